"""Adds ids to items and converts items to messages for the chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from trouper.protocol.problems import Problem, RequestFailed, quoted
from trouper.web.http.body_parsing import combination
from trouper.web.output.dialect import Json
from trouper.web.output.tool_calls import NO_TOOLS, Tools
from trouper.web.responses.built_in_tools import arguments_of_item
from trouper.web.responses.call_items import CALLS, OUTPUTS, output_text, tool_of
from trouper.web.responses.item_types import InputMessage, Item, ItemReference


def references_of(value: str | Sequence[Item]) -> list[str]:
    """Ids of stored items in the request's `input`."""
    if isinstance(value, str):
        return []
    return [item.id for item in value if isinstance(item, ItemReference)]


def items_of(value: str | Sequence[Item], stored: Mapping[str, Json]) -> tuple[Json, ...]:
    """Complete the request's `input`. `stored` has the referenced items by id. Raises
    `RequestFailed` (400; 404 for an item that is not stored)."""
    if isinstance(value, str):
        return (InputMessage(role="user", content=value).stored("input"),)
    items = tuple(
        _referred(item.id, f"input.{index}.id", stored)
        if isinstance(item, ItemReference)
        else item.stored(f"input.{index}")
        for index, item in enumerate(value)
    )
    _check_references(value, items)
    return items


def _check_references(given: Sequence[Item], items: Sequence[Json]) -> None:
    """Refuse repeated references: a short request must not become an endless prompt. Raises
    `RequestFailed` (400)."""
    seen: set[int] = set()
    for index, (original, item) in enumerate(zip(given, items, strict=True)):
        if isinstance(original, ItemReference):
            if id(item) in seen:
                path = f"input.{index}.id"
                raise combination(f"{path}: {item['id']!r} is referred to twice", path)
            seen.add(id(item))


def _referred(item_id: str, path: str, stored: Mapping[str, Json]) -> Json:
    if item_id not in stored:
        detail = f"no item {quoted(item_id)} is stored here, or it is gone: send the item itself"
        raise RequestFailed(Problem(404, detail, "invalid_request_error", path, "item_not_found"))
    return stored[item_id]


def check_outputs(earlier: Iterable[Json], items: Sequence[Json]) -> None:
    """Check that each output answers a call. Raises `RequestFailed` (400)."""
    calls = {item["call_id"] for item in earlier if item["type"] in CALLS}
    for index, item in enumerate(items):
        if item["type"] in CALLS:
            calls.add(item["call_id"])
        elif item["type"] in OUTPUTS and item["call_id"] not in calls:
            path = f"input.{index}.call_id"
            raise combination(f"{path}: no call {item['call_id']!r} comes before this output", path)


# -- what the model reads ------------------------------------------------------------------------


def messages_of(
    instructions: str | None, items: Iterable[Json], tools: Tools = NO_TOOLS
) -> tuple[Json, ...]:
    """Convert items to chat messages, one per turn of reasoning, text and calls. `tools` are the
    tools offered now, under the names in earlier calls."""
    messages: list[Json] = (
        [] if instructions is None else [{"role": "system", "content": instructions}]
    )
    turn: Json | None = None
    """The assistant message that the next items may extend."""
    for item in items:
        match item["type"]:
            case "message" if item["role"] != "assistant":
                turn = None
                role = "system" if item["role"] == "developer" else item["role"]
                messages.append({"role": role, "content": _text(item["content"])})
            case kind if kind in OUTPUTS:
                turn = None
                messages.append(
                    {"role": "tool", "content": output_text(item), "tool_call_id": item["call_id"]}
                )
            case kind:
                if turn is None or not _continues(turn, kind):
                    turn = {"role": "assistant", "content": ""}
                    messages.append(turn)
                _extend(turn, item, tools)
    return tuple(messages)


def _continues(turn: Json, kind: str) -> bool:
    """Whether an item extends the open message: reasoning, then text, then calls."""
    return kind in CALLS or not (turn["content"] or "tool_calls" in turn)


def _extend(turn: Json, item: Json, tools: Tools) -> None:
    match item["type"]:
        case "message":
            turn["content"] = _text(item["content"])
        case "reasoning":
            thought = _text(item["content"] or item["summary"])
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
        case _:
            function = {"name": tools.called(tool_of(item)), "arguments": arguments_of_item(item)}
            call = {"id": item["call_id"], "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)


def _text(parts: Iterable[Json]) -> str:
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)


# -- pages ---------------------------------------------------------------------------------------


def page_of(items: Sequence[Json], after: str | None, limit: int) -> Json:
    """Return a page of items. Raises `RequestFailed` (404)."""
    if after is not None:
        found = [index for index, item in enumerate(items) if item["id"] == after]
        if not found:
            message = f"no item {after!r} went into this response"
            raise RequestFailed(
                Problem(404, message, "invalid_request_error", "after", "item_not_found")
            )
        items = items[found[0] + 1 :]
    page = items[:limit]
    ends = {
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }
    return {"object": "list", "data": page, "has_more": len(items) > limit} | ends
