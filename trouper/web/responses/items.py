"""Items of a responses conversation: validation, completion with ids, and conversion to messages for the chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from trouper.protocol.problems import Problem, RequestFailed, bad_request
from trouper.web.http.body_parsing import combination, json_type
from trouper.web.openai.chat_tools import arguments_of
from trouper.web.output.dialect import Json
from trouper.web.responses.schemas import MAX_ID, MAX_ITEMS, ROLES, STATUSES

KEYS = {
    "message": frozenset({"type", "id", "status", "role", "content", "phase"}),
    "function_call": frozenset({"type", "id", "status", "call_id", "name", "arguments"}),
    "function_call_output": frozenset({"type", "id", "status", "call_id", "output", "name"}),
    "reasoning": frozenset({"type", "id", "status", "summary", "content"}),
    "item_reference": frozenset({"type", "id"}),
}
"""Keys of each type of item. `phase`, and the `name` beside a `call_id`, hold nothing that a model could use."""
PART_KEYS = {
    "input_text": frozenset({"type", "text", "prompt_cache_breakpoint"}),
    "output_text": frozenset({"type", "text", "annotations", "logprobs"}),
    "refusal": frozenset({"type", "refusal"}),
    "summary_text": frozenset({"type", "text"}),
    "reasoning_text": frozenset({"type", "text"}),
}
"""Keys of each type of content part. Caching changes no output; annotations and logprobs are sent back from an earlier
answer."""
PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}

Find = Callable[[str], Json | None]
"""Finds a stored item by its id."""


def new_id(prefix: str) -> str:
    return prefix + uuid4().hex


def items_of(value: Any, find: Find) -> tuple[Json, ...]:
    """Parse the request's `input`. Raises `RequestFailed` (400; 404 for a reference to an item that is not stored)."""
    if isinstance(value, str):
        return (_message({"role": "user", "content": value}, "input"),)
    if not isinstance(value, list):
        raise bad_request(
            f"input must be a string or an array of items, not {json_type(value)}", "input", "invalid_type"
        )
    if len(value) > MAX_ITEMS:
        raise bad_request(f"input may have {MAX_ITEMS} items, not {len(value)}", "input", "invalid_value")
    items = tuple(_item(item, f"input.{index}", find) for index, item in enumerate(value))
    _check_references(value, items)
    return items


def _check_references(given: list[Any], items: Sequence[Json]) -> None:
    """Check that no item is referenced twice: a short request may not become a prompt of any length. Raises
    `RequestFailed` (400)."""
    seen: set[int] = set()
    for index, (original, item) in enumerate(zip(given, items, strict=True)):
        if original.get("type") in (None, "item_reference") and original.get("role") is None:
            if id(item) in seen:
                path = f"input.{index}.id"
                raise combination(f"{path}: {item['id']!r} is referred to twice", path)
            seen.add(id(item))


def _item(item: Any, path: str, find: Find) -> Json:
    if not isinstance(item, dict):
        raise bad_request(f"{path} must be an object, not {json_type(item)}", path, "invalid_type")
    kind = item.get("type")
    if kind is None:  # Messages and references may omit their type.
        kind = "item_reference" if item.get("role") is None else "message"
    if not isinstance(kind, str) or kind not in KEYS:
        raise bad_request(f"{path}: items of type {kind!r} are not supported here", f"{path}.type", "unsupported_item")
    _only(item, KEYS[kind], path)
    if kind == "item_reference":
        return _referred(item.get("id"), f"{path}.id", find)
    return READERS[kind](item, path)


def _referred(item_id: Any, path: str, find: Find) -> Json:
    if not isinstance(item_id, str):
        raise bad_request(f"{path} must be a string, not {json_type(item_id)}", path, "invalid_type")
    found = find(item_id)
    if found is None:
        detail = f"no item {item_id!r} is stored here, or it is gone: send the item itself"
        raise RequestFailed(Problem(404, detail, "invalid_request_error", path, "item_not_found"))
    return found


def _only(given: Json, known: frozenset[str], path: str) -> None:
    for name, value in given.items():
        if name not in known and value is not None:
            raise bad_request(f"{path}.{name} is not supported here", f"{path}.{name}", "unsupported_parameter")


def _head(item: Json, kind: str, path: str) -> Json:
    """Return the fields that every item has. An item without an id gets one."""
    item_id, status = item.get("id"), item.get("status")
    if item_id is not None and not (isinstance(item_id, str) and 0 < len(item_id) <= MAX_ID):
        raise bad_request(f"{path}.id must be a string of 1 to {MAX_ID} characters", f"{path}.id", "invalid_value")
    if status is not None and status not in STATUSES:
        raise bad_request(f"{path}.status must be one of {', '.join(STATUSES)}", f"{path}.status", "invalid_value")
    return {"id": item_id or new_id(PREFIXES[kind]), "type": kind, "status": status or "completed"}


def _string(item: Json, name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{path}.{name} must be a string, not {json_type(value)}", f"{path}.{name}", "invalid_type")
    return value


def _message(item: Json, path: str) -> Json:
    role = item.get("role")
    if role not in ROLES:
        raise bad_request(
            f"{path}.role must be one of {', '.join(ROLES)}, not {role!r}", f"{path}.role", "invalid_value"
        )
    content = item.get("content")
    if isinstance(content, str):
        parts = [("input_text", content)]
    elif isinstance(content, list):
        allowed = ("input_text", "output_text", "refusal") if role == "assistant" else ("input_text", "output_text")
        parts = [_part(part, allowed, f"{path}.content.{index}") for index, part in enumerate(content)]
    else:
        detail = f"{path}.content must be a string or an array of parts, not {json_type(content)}"
        raise bad_request(detail, f"{path}.content", "invalid_type")
    make_part = _answer_part if role == "assistant" else _prompt_part
    return _head(item, "message", path) | {"role": role, "content": [make_part(kind, text) for kind, text in parts]}


def _answer_part(kind: str, text: str) -> Json:
    return {"type": "refusal", "refusal": text} if kind == "refusal" else text_part(text)


def _prompt_part(_: str, text: str) -> Json:
    return {"type": "input_text", "text": text}


def _part(part: Any, allowed: Sequence[str], path: str) -> tuple[str, str]:
    """Parse a content part to (type, text)."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in allowed:
        known = " or ".join(allowed)
        raise bad_request(
            f"{path}: only parts of type {known} are supported, not {kind!r}", path, "unsupported_content"
        )
    _only(part, PART_KEYS[kind], path)
    return kind, _string(part, "refusal" if kind == "refusal" else "text", path)


def _call(item: Json, path: str) -> Json:
    arguments = _string(item, "arguments", path)
    arguments_of(arguments, f"{path}.arguments")
    return _head(item, "function_call", path) | {
        "call_id": _string(item, "call_id", path),
        "name": _string(item, "name", path),
        "arguments": arguments,
    }


def _output(item: Json, path: str) -> Json:
    output = item.get("output")
    if isinstance(output, list):
        parts = (_part(part, ("input_text",), f"{path}.output.{index}") for index, part in enumerate(output))
        content: str | list[Json] = [_prompt_part(kind, text) for kind, text in parts]
    else:
        content = _string(item, "output", path)
    return _head(item, "function_call_output", path) | {"call_id": _string(item, "call_id", path), "output": content}


def _reasoning(item: Json, path: str) -> Json:
    return _head(item, "reasoning", path) | {
        name: [
            {"type": kind, "text": _part(part, (kind,), f"{path}.{name}.{index}")[1]}
            for index, part in enumerate(_parts(item.get(name), f"{path}.{name}"))
        ]
        for name, kind in (("summary", "summary_text"), ("content", "reasoning_text"))
    }


def _parts(value: Any, path: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise bad_request(f"{path} must be an array of parts, not {json_type(value)}", path, "invalid_type")
    return value or []


READERS: dict[str, Callable[[Json, str], Json]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
    "reasoning": _reasoning,
}


def check_outputs(earlier: Iterable[Json], items: Sequence[Json]) -> None:
    """Check that each output answers a call. Raises `RequestFailed` (400)."""
    calls = {item["call_id"] for item in earlier if item["type"] == "function_call"}
    for index, item in enumerate(items):
        if item["type"] == "function_call":
            calls.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in calls:
            path = f"input.{index}.call_id"
            raise combination(f"{path}: no call {item['call_id']!r} comes before this output", path)


# -- what the model reads ------------------------------------------------------------------------------


def messages_of(instructions: str | None, items: Iterable[Json]) -> tuple[Json, ...]:
    """Convert items to the messages of a chat: reasoning, text and calls of one turn are one message."""
    messages: list[Json] = [] if instructions is None else [{"role": "system", "content": instructions}]
    turn: Json | None = None
    """The assistant's message that the next items may extend."""
    for item in items:
        match item["type"]:
            case "message" if item["role"] != "assistant":
                turn = None
                role = "system" if item["role"] == "developer" else item["role"]
                messages.append({"role": role, "content": _text(item["content"])})
            case "function_call_output":
                turn = None
                output = item["output"]
                content = output if isinstance(output, str) else _text(output)
                messages.append({"role": "tool", "content": content, "tool_call_id": item["call_id"]})
            case kind:
                if turn is None or not _continues(turn, kind):
                    turn = {"role": "assistant", "content": ""}
                    messages.append(turn)
                _extend(turn, item)
    return tuple(messages)


def _continues(turn: Json, kind: str) -> bool:
    """Whether an item extends the open message. Reasoning comes before text, text before calls; an item out of order
    begins another message."""
    return kind == "function_call" or not (turn["content"] or "tool_calls" in turn)


def _extend(turn: Json, item: Json) -> None:
    match item["type"]:
        case "message":
            turn["content"] = _text(item["content"])
        case "reasoning":
            thought = _text(item["content"] or item["summary"])
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
        case _:
            function = {"name": item["name"], "arguments": msgspec.json.decode(item["arguments"] or "{}")}
            call = {"id": item["call_id"], "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)


def _text(parts: Iterable[Json]) -> str:
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)


# -- what the model said -------------------------------------------------------------------------------


def text_part(text: str, logprobs: Sequence[Json] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
