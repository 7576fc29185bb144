"""Conversion of a request's messages to messages for the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from trouper.protocol.problems import bad_request
from trouper.web.anthropic.thinking import thought
from trouper.web.http.body_parsing import NAMES, at_most, combination, json_type
from trouper.web.http.request_schema import Json, among
from trouper.web.openai.schemas import MAX_MESSAGES

Takes = dict[str, tuple[Any, ...] | type | None]


@attrs.frozen
class Kind:
    """The required and the optional keys of a block: names with their type, or with the values that request nothing;
    None accepts any value."""

    needs: dict[str, type]
    takes: Takes


CACHING: Takes = {"cache_control": None}
"""A key that asks for caching, which changes no output (and happens anyway)."""
BLOCKS = {
    "text": Kind({"text": str}, CACHING | {"citations": ([],)}),
    "tool_use": Kind({"id": str, "name": str, "input": dict}, CACHING | {"caller": ({"type": "direct"},)}),
    "tool_result": Kind({"tool_use_id": str}, CACHING | {"content": None, "is_error": bool}),
    "thinking": Kind({"thinking": str}, {"signature": str}),
    "redacted_thinking": Kind({"data": str}, {}),
}
ROLES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
"""Block types by role. Images, documents, and all blocks of hosted tools are refused by name."""
NOT_FOR_MODELS = "x-anthropic-"
"""The beginning of a system block that clients mean for the API, not for the model. One of them has a hash that changes
with every request, so with it no prompt would share a prefix with the one before:
https://github.com/vllm-project/vllm/pull/36829."""


def conversation_of(system: Any, messages: Any) -> tuple[Json, ...]:
    """Convert the messages. Raises `RequestFailed` (400) naming the parameter."""
    if not isinstance(messages, list):
        raise bad_request(f"messages must be an array, not {json_type(messages)}", "messages", "invalid_type")
    if not messages:
        raise bad_request("messages is empty; send at least one", "messages", "invalid_value")
    at_most("messages", messages, MAX_MESSAGES)
    turns = _system(system)
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        turns += _turns(message, f"messages.{index}", names)
    return tuple(_combined(turns))


def continues(turns: Sequence[Json]) -> bool:
    """Whether the answer continues the last message. Raises `RequestFailed` (400)."""
    if turns[-1]["role"] != "assistant":
        return False
    if turns[-1].get("tool_calls"):
        detail = "the last message calls a tool: send its tool_result behind it"
        raise combination(f"messages: {detail}", "messages")
    return True


def _system(value: Any) -> list[Json]:
    if value is None:
        return []
    texts = [block["text"] for block in _blocks(value, "system", ROLES["system"])]
    text = "\n".join(text for text in texts if text and not text.startswith(NOT_FOR_MODELS))
    return [{"role": "system", "content": text}] if text else []


def _turns(message: Any, path: str, names: dict[str, str]) -> list[Json]:
    """Convert a message to turns. `names` holds the names of the tools that were called so far, by the id of the call,
    because a result has only the id."""
    if not isinstance(message, dict):
        raise bad_request(f"{path} must be an object, not {json_type(message)}", path, "invalid_type")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(ROLES)
        raise bad_request(f"{path}.role must be one of {known}, not {role!r}", f"{path}.role", "invalid_value")
    for name, value in message.items():
        if name not in ("role", "content") and value is not None:
            raise bad_request(f"{path}.{name} is not supported here", f"{path}.{name}", "unsupported_parameter")
    blocks = _blocks(message.get("content"), f"{path}.content", ROLES[role])
    if role == "assistant":
        return _assistant(blocks, names)
    return [
        {"role": role, "content": block["text"]}
        if block["type"] == "text"
        else _result(block, f"{path}.content.{index}", names)
        for index, block in enumerate(blocks)
    ] or [{"role": role, "content": ""}]


def _assistant(blocks: Sequence[Json], names: dict[str, str]) -> list[Json]:
    turn: Json = {"role": "assistant", "content": "\n".join(block["text"] for block in blocks if "text" in block)}
    calls = [block for block in blocks if block["type"] == "tool_use"]
    if calls:
        names.update((call["id"], call["name"]) for call in calls)
        turn["tool_calls"] = [_call(call) for call in calls]
    if thoughts := [text for block in blocks if block["type"] == "thinking" and (text := thought(block))]:
        turn["reasoning_content"] = "\n".join(thoughts)
    return [turn]


def _call(block: Json) -> Json:
    return {
        "id": block["id"],
        "type": "function",
        "function": {"name": block["name"], "arguments": block["input"]},
    }


def _result(block: Json, path: str, names: dict[str, str]) -> Json:
    content = block.get("content")
    parts = [] if content is None else _blocks(content, f"{path}.content", ("text",))
    text = "\n".join(part["text"] for part in parts)
    turn = {
        "role": "tool",
        "tool_call_id": block["tool_use_id"],
        "content": f"Error: {text}" if block.get("is_error") else text,
    }
    name = names.get(block["tool_use_id"])
    return turn if name is None else turn | {"name": name}


def _combined(turns: Sequence[Json]) -> list[Json]:
    """Merge neighbouring messages of one role, as the API defines it: some templates refuse two user turns in a row."""
    combined: list[Json] = []
    for turn in turns:
        if turn["role"] != "tool" and combined and combined[-1]["role"] == turn["role"]:
            combined[-1] = _both(combined[-1], turn)
        else:
            combined.append(turn)
    last = combined[-1]
    empty = last["role"] == "assistant" and not last["content"] and last.keys() <= {"role", "content"}
    return combined[:-1] if empty and len(combined) > 1 else combined


def _both(first: Json, second: Json) -> Json:
    both = first | second
    for name in ("content", "reasoning_content"):
        if first.get(name) and second.get(name):
            both[name] = f"{first[name]}\n{second[name]}"
        elif name in both:
            both[name] = first.get(name) or second.get(name) or ""
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return both | ({"tool_calls": calls} if calls else {})


def _blocks(value: Any, path: str, kinds: tuple[str, ...]) -> list[Json]:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise bad_request(
            f"{path} must be a string or an array of blocks, not {json_type(value)}", path, "invalid_type"
        )
    return [_block(block, f"{path}.{index}", kinds) for index, block in enumerate(value)]


def _block(block: Any, path: str, kinds: tuple[str, ...]) -> Json:
    """Check a block, and return its fields without those that are null, which request nothing."""
    if not isinstance(block, dict):
        raise bad_request(f"{path} must be an object, not {json_type(block)}", path, "invalid_type")
    name = block.get("type")
    if name not in kinds:
        detail = f"{path}: a block here may be of type {', '.join(kinds)}, not {name!r}"
        raise bad_request(detail, path, "unsupported_content")
    kind = BLOCKS[name]
    for key, needed in kind.needs.items():
        _check_type(block.get(key), needed, f"{path}.{key}")
    for key, value in block.items():
        if key == "type" or key in kind.needs or value is None:
            continue
        taken = kind.takes.get(key, ())
        if isinstance(taken, type):
            _check_type(value, taken, f"{path}.{key}")
        elif taken is not None and not among(value, taken):
            raise bad_request(f"{path}.{key} is not supported here", f"{path}.{key}", "unsupported_parameter")
    return {key: value for key, value in block.items() if value is not None}


def _check_type(value: Any, kind: type, path: str) -> None:
    if type(value) is not kind:
        detail = f"{path} must be {NAMES.get(kind, 'an object')}, not {json_type(value)}"
        raise bad_request(detail, path, "invalid_type")
