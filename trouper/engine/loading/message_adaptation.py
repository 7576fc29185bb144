"""Adaptation of messages to chat templates that refuse or drop some. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Literal

import attrs

Message = dict[str, Any]
Change = Callable[[Message], Message]
SEPARATOR = "\n\n"
INSTRUCTIONS = "<system>\n{}\n</system>"
CALL, RESULT = "<tool_call>\n{}\n</tool_call>", "<tool_response>\n{}\n</tool_response>"
EMPTY_RESULT = "(empty)"
MOVED_IMAGE = "[The image is in the next message.]"
ID_LENGTH = 9
"""Length that Mistral's templates require."""


# A change depends only on messages up to there: a first turn stays the same in later turns, and the
# prefix cache holds.
@attrs.frozen(kw_only=True)
class MessageAdaptation:
    """The defaults change nothing."""

    content: Literal["text", "parts"] = "text"
    system: Literal["given", "merged", "user"] = "given"
    """merged: one message. user: put into the first user message."""
    later_system: Literal["given", "user"] = "given"
    """user: a marked user message at the same position."""
    system_after_tool: Literal["given", "tool", "user"] = "given"
    """tool: appended to the result, marked, for templates that drop reasoning before the latest
    user message."""
    users: Literal["given", "merged"] = "given"
    assistants: Literal["given", "merged"] = "given"
    first_user: bool = False
    """Whether an empty user message precedes another role."""
    user_after_tool: Literal["given", "assistant"] = "given"
    """assistant: an empty assistant message stands between."""
    arguments: Literal["object", "json"] = "object"
    call_ids: Literal["given", "hashed"] = "given"
    empty_content: Literal["given", "absent"] = "given"
    calls: Literal["given", "split", "separated", "text"] = "given"
    """split: text and calls become two messages. separated: with an empty user message between.
    text: calls become text."""
    results: Literal["given", "user"] = "given"
    """user: marked user messages."""
    parallel_calls: Literal["given", "single"] = "given"
    """single: each call becomes a message before the result."""
    empty_results: Literal["given", "marked"] = "given"
    empty_answers: Literal["given", "blank"] = "given"
    """blank: an assistant message without text and calls has a space."""
    reasoning: Literal["given", "chunk"] = "given"
    """chunk: an answer's reasoning is the first part of its content."""
    tool_images: Literal["given", "user"] = "given"
    """user: images of tool results become a user message behind them."""

    @property
    def changes(self) -> tuple[tuple[str, str], ...]:
        fields = attrs.asdict(self)
        return tuple(
            (name, text) for (name, value), text in DESCRIPTIONS.items() if fields[name] == value
        )

    def adapted(
        self, messages: Iterable[Mapping[str, Any]], change: Change | None = None
    ) -> list[Message]:
        """Roles come first, then neighbours of one role are joined, then calls are split, whose
        parts are neighbours. `change`: of each message's own texts, before others join them."""
        plain = _with_names([_plain(message) for message in messages])
        if change is not None:
            plain = [change(message) for message in plain]
        if self.tool_images == "user":
            plain = _behind_results(plain)
        turns = self._with_first_user(self._with_system(plain))
        if self.results == "user":
            turns = [_as_user(turn) for turn in turns]
        turns = self._with_roles(turns)
        turns = [call for turn in turns for call in self._with_calls(turn)]
        if self.parallel_calls == "single":
            turns = _one_by_one(turns)
        return [self._with_content(self._with_reasoning(turn)) for turn in turns]

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        """Change system messages: those at the beginning by `system`, later ones by `later_system`,
        or by `system_after_tool` behind a tool's result."""
        first = next(
            (index for index, turn in enumerate(messages) if turn["role"] != "system"),
            len(messages),
        )
        turns, later = list(messages[:first]), messages[first:]
        if self.system != "given" and turns:
            text = SEPARATOR.join(_text(turn) for turn in turns)
            if self.system == "merged":
                turns = [turns[0] | {"content": text}]
            elif later and later[0]["role"] == "user":
                turns, later = [_prefixed(later[0], text)], later[1:]
            else:
                turns = [{"role": "user", "content": text}]
        for turn in later:
            if turn["role"] != "system":
                turns.append(turn)
                continue
            after_tool = turns[-1]["role"] == "tool"
            way = self.system_after_tool if after_tool else self.later_system
            marked = INSTRUCTIONS.format(_text(turn))
            if way == "tool":
                turns[-1] = turns[-1] | {"content": _joined_contents(turns[-1]["content"], marked)}
            else:
                turns.append(turn if way == "given" else {"role": "user", "content": marked})
        return turns

    def _with_first_user(self, turns: list[Message]) -> list[Message]:
        first = next(
            (index for index, turn in enumerate(turns) if turn["role"] != "system"), len(turns)
        )
        if not self.first_user or (first < len(turns) and turns[first]["role"] == "user"):
            return turns
        return [*turns[:first], {"role": "user", "content": ""}, *turns[first:]]

    def _with_roles(self, turns: Sequence[Message]) -> list[Message]:
        merged = {"user": self.users == "merged", "assistant": self.assistants == "merged"}
        joined: list[Message] = []
        for turn in turns:
            before = joined[-1]["role"] if joined else None
            if before == turn["role"] and merged.get(turn["role"], False):
                joined[-1] = _both(joined[-1], turn)
                continue
            called = before == "tool" or (before is not None and joined[-1].get("tool_calls"))
            if called and turn["role"] == "user" and self.user_after_tool == "assistant":
                joined.append({"role": "assistant", "content": ""})
            joined.append(turn)
        return joined

    def _with_calls(self, turn: Message) -> list[Message]:
        """Write an answer's calls as the template takes them: as text, apart from the text, or as
        given."""
        if turn["role"] == "tool":
            return [self._with_result(turn)]
        if not turn.get("tool_calls"):
            silent = turn["role"] == "assistant" and not turn.get("content")
            return [turn | {"content": " "} if silent and self.empty_answers == "blank" else turn]
        turn = turn | {"tool_calls": [self._with_arguments(call) for call in turn["tool_calls"]]}
        text = turn.get("content")
        if self.calls == "text":
            written = "\n".join(CALL.format(_written(call)) for call in turn.pop("tool_calls"))
            return [turn | {"content": _joined(_text(turn), written)}]
        if self.calls in ("split", "separated") and text:
            alone = {name: value for name, value in turn.items() if name != "tool_calls"}
            between: list[Message] = (
                [{"role": "user", "content": ""}] if self.calls == "separated" else []
            )
            return [
                alone,
                *between,
                self._without_text({"role": "assistant", "tool_calls": turn["tool_calls"]}),
            ]
        return [turn if text else self._without_text(turn)]

    def _without_text(self, turn: Message) -> Message:
        absent = self.empty_content == "absent"
        plain = {name: value for name, value in turn.items() if name != "content"}
        return plain if absent else plain | {"content": ""}

    def _with_result(self, turn: Message) -> Message:
        if self.empty_results == "marked" and not turn.get("content"):
            turn = turn | {"content": EMPTY_RESULT}
        call_id = turn.get("tool_call_id")
        if self.call_ids == "hashed" and isinstance(call_id, str):
            turn = turn | {"tool_call_id": _hashed(call_id)}
        return turn

    def _with_arguments(self, call: Mapping[str, Any]) -> Message:
        changed = dict(call)
        if self.arguments == "json":
            function = call["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            changed["function"] = function | {"arguments": arguments}
        if self.call_ids == "hashed":
            changed["id"] = _hashed(str(call.get("id", "")))
        return changed

    def _with_reasoning(self, turn: Message) -> Message:
        thought = turn.get("reasoning_content")
        if self.reasoning == "given" or not isinstance(thought, str) or not thought:
            return turn
        plain = {name: value for name, value in turn.items() if name != "reasoning_content"}
        content = turn.get("content") or ""
        texts = [] if isinstance(content, str) and not content.strip() else _part_list(content)
        return plain | {"content": [{"type": "thinking", "thinking": thought}, *texts]}

    def _with_content(self, turn: Message) -> Message:
        content = turn.get("content")
        if self.content == "text" or not isinstance(content, str):
            return turn
        return turn | {"content": [{"type": "text", "text": content}]}


DESCRIPTIONS = {
    ("content", "parts"): "content becomes an array of parts",
    ("system", "merged"): "system messages at the beginning become one",
    (
        "system",
        "user",
    ): "system messages at the beginning become the beginning of the first user message",
    (
        "later_system",
        "user",
    ): "later system messages become user messages, marked, at the same position",
    (
        "system_after_tool",
        "tool",
    ): "system messages after a tool result become the end of it, marked",
    (
        "system_after_tool",
        "user",
    ): "system messages after a tool result become user messages, marked",
    ("users", "merged"): "consecutive user messages become one",
    ("assistants", "merged"): "consecutive assistant messages become one",
    ("first_user", True): "an empty user message precedes a conversation that begins without one",
    (
        "user_after_tool",
        "assistant",
    ): "an empty assistant message separates a tool result from a user message",
    ("arguments", "json"): "arguments of earlier calls become JSON text",
    ("call_ids", "hashed"): f"ids of earlier calls become {ID_LENGTH} letters and digits",
    ("empty_content", "absent"): "an assistant message with calls and no text has no content",
    ("calls", "split"): "the text of an assistant message with calls becomes a message of its own",
    (
        "calls",
        "separated",
    ): (
        "the text of an assistant message with calls becomes a message, an empty user message "
        "follows"
    ),
    ("calls", "text"): "earlier calls become text",
    ("results", "user"): "tool results become user messages, marked",
    (
        "parallel_calls",
        "single",
    ): "earlier calls of one message become one message each, with its result behind it",
    ("empty_results", "marked"): f"empty tool results become {EMPTY_RESULT}",
    ("empty_answers", "blank"): "an assistant message without text and calls becomes a space",
    ("reasoning", "chunk"): "reasoning of earlier answers becomes a part of their content",
    ("tool_images", "user"): "images of tool results become a user message behind them",
}


def _plain(message: Mapping[str, Any]) -> Message:
    plain = dict(message)
    if plain["role"] == "developer":
        plain["role"] = "system"
    content = plain.get("content")
    if (
        isinstance(content, Sequence)
        and not isinstance(content, str)
        and all(map(_is_text, content))
    ):
        plain["content"] = "".join(part["text"] for part in content)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_parsed(call) for call in plain["tool_calls"]]
    return plain


def _with_names(messages: Iterable[Message]) -> list[Message]:
    """Give results the names of their calls, which some templates write. Clients send ids alone."""
    names: dict[Any, Any] = {}
    turns = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call.get("id")] = call["function"].get("name")
        name = names.get(message.get("tool_call_id")) if message["role"] == "tool" else None
        turns.append({"name": name, **message} if name is not None else message)
    return turns


def _parsed(call: Mapping[str, Any]) -> Message:
    """A call whose arguments are an object."""
    function = call.get("function") or {}
    arguments = _object(function.get("arguments"))
    return dict(call) | {"function": dict(function) | {"arguments": arguments}}


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    )


def _text(turn: Mapping[str, Any]) -> str:
    content = turn.get("content")
    return content if isinstance(content, str) else ""


def _joined(*texts: str) -> str:
    return SEPARATOR.join(filter(None, texts))


def _prefixed(turn: Message, text: str) -> Message:
    content = turn.get("content")
    if isinstance(content, str | None):
        return turn | {"content": _joined(text, content or "")}
    return turn | {"content": [{"type": "text", "text": text + SEPARATOR}, *content]}


def _both(first: Message, second: Message) -> Message:
    both = first | second
    if "content" in first and "content" in second:
        both["content"] = _joined_contents(first["content"], second["content"])
    thought, later = first.get("reasoning_content"), second.get("reasoning_content")
    if isinstance(thought, str) and isinstance(later, str):
        both["reasoning_content"] = _joined(thought, later)
    calls = [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]
    return both | ({"tool_calls": calls} if calls else {})


def _joined_contents(first: Any, second: Any) -> Any:
    """Contents of two messages as one: text, or parts if there are images."""
    if isinstance(first, str | None) and isinstance(second, str | None):
        return _joined(first or "", second or "")
    if not first or not second:
        return first or second
    return [*_part_list(first), {"type": "text", "text": SEPARATOR}, *_part_list(second)]


def _part_list(content: Any) -> list[Message]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else [*content]


def _behind_results(messages: Sequence[Message]) -> list[Message]:
    """Move images behind the last of neighbouring results, which templates want together."""
    turns: list[Message] = []
    images: list[Message] = []
    for message in messages:
        if message["role"] != "tool":
            turns += _of_user(images)
            images = []
        elif isinstance(content := message.get("content"), list):
            images += [part for part in content if part["type"] == "image"]
            texts = [MOVED_IMAGE if part["type"] == "image" else part["text"] for part in content]
            message = message | {"content": "\n".join(texts)}  # noqa: PLW2901
        turns.append(message)
    return turns + _of_user(images)


def _of_user(images: list[Message]) -> list[Message]:
    return [{"role": "user", "content": images}] if images else []


def _as_user(turn: Message) -> Message:
    if turn["role"] != "tool":
        return turn
    content = turn.get("content")
    if not isinstance(content, list):
        return {"role": "user", "content": RESULT.format(_text(turn))}
    before, behind = RESULT.split("{}")
    return {"role": "user", "content": [*_part_list(before), *content, *_part_list(behind)]}


def _object(arguments: Any) -> Mapping[str, Any]:
    """Malformed text becomes one value: a model's mistake must not end the conversation."""
    if isinstance(arguments, Mapping):
        return arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, TypeError, RecursionError):
        parsed = arguments
    return parsed if isinstance(parsed, dict) else {"arguments": arguments}


def _written(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return json.dumps(
        {"name": function.get("name"), "arguments": _object(function["arguments"])},
        ensure_ascii=False,
    )


def _hashed(call_id: str) -> str:
    return (
        call_id
        if len(call_id) == ID_LENGTH and call_id.isalnum()
        else sha256(call_id.encode(errors="ignore")).hexdigest()[:ID_LENGTH]
    )


def _one_by_one(turns: Sequence[Message]) -> list[Message]:
    """Give each call of several a message of its own, directly before its result."""
    single: list[Message] = []
    waiting: list[Message] = []
    for turn in turns:
        calls = turn.get("tool_calls") or ()
        if turn["role"] == "tool" and waiting:
            found = [
                call
                for call in waiting
                if call["tool_calls"][0].get("id") == turn.get("tool_call_id")
            ]
            call = (found or waiting)[0]
            first = waiting.pop(0)  # The first call has the answer's text, which precedes results.
            call["tool_calls"], first["tool_calls"] = first["tool_calls"], call["tool_calls"]
            single += [first, turn]
            continue
        single += waiting
        waiting = []
        if len(calls) < 2:
            single.append(turn)
            continue
        bare = {"role": "assistant"} | ({"content": ""} if "content" in turn else {})
        waiting = [
            (turn if not index else bare) | {"tool_calls": [call]}
            for index, call in enumerate(calls)
        ]
    return [*single, *waiting]
