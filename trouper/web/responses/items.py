"""Items of a responses conversation: types, the stored form with ids, and messages for the chat
template."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from trouper.protocol.media import ImageSource
from trouper.protocol.problems import Problem, RequestFailed, bad_request, quoted
from trouper.web.http.body_faults import explains, says
from trouper.web.http.body_parsing import combination
from trouper.web.http.field_types import Ignored, JsonText
from trouper.web.http.image_source import (
    ImageParts,
    content_of,
    data_url,
    fields_of,
    is_remote,
)
from trouper.web.http.leniency import Adapt, Skip, known_value, safe_name
from trouper.web.http.request_body import SentBack
from trouper.web.openai.chat_tools import arguments_adapted, arguments_of
from trouper.web.openai.other_servers import PLACEHOLDER, item_adapted
from trouper.web.output.dialect import Json
from trouper.web.output.tool_calls import NO_TOOLS, Tools
from trouper.web.responses.call_items import (
    CALLS,
    INPUT_PARTS,
    MAX_ID,
    OUTPUTS,
    PARTS,
    CallItem,
    CallOutputItem,
    ConversationItem,
    FunctionCallOutputItem,
    InputImage,
    InputText,
    OutputText,
    ReasoningText,
    RefusalText,
    SummaryText,
    input_text,
    not_a_part,
    output_parts,
    refuse_part,
    text_part,
    tool_of,
)
from trouper.web.responses.response_tools import arguments_of_item
from trouper.web.responses.schemas import PARTS_OF_ROLES, STATUSES

MAX_ITEMS = 10_000


class InputMessage(ConversationItem, tag="message", kw_only=True, frozen=True):
    """A message. `phase` holds nothing that a model could use."""

    may_lack_tag: ClassVar[bool] = True
    rules: ClassVar[tuple[Json, ...]] = (PARTS_OF_ROLES,)
    role: Annotated[
        Literal["user", "assistant", "system", "developer"],
        says("{path} must be one of user, assistant, system, developer, not {value!r}"),
    ]
    content: Annotated[
        str | list[InputText | OutputText | RefusalText | InputImage],
        says("{path} must be a string or an array of parts, not {type}", "invalid_type"),
    ]
    phase: Ignored = None

    def stored(self, path: str) -> Json:
        """Return the stored form. Raises `RequestFailed` (400), as in the other item types."""
        parts: Sequence[InputText | OutputText | RefusalText | InputImage]
        parts = [InputText(self.content)] if isinstance(self.content, str) else self.content
        content = [self._part(part, f"{path}.content.{index}") for index, part in enumerate(parts)]
        return self.head() | {"role": self.role, "content": content}

    def _part(self, part: InputText | OutputText | RefusalText | InputImage, path: str) -> Json:
        if isinstance(part, InputImage):
            if self.role == "assistant":
                refuse_part((*PARTS, "refusal"), "input_image", path)
            return part.stored()
        if not isinstance(part, RefusalText):
            return text_part(part.text) if self.role == "assistant" else input_text(part.text)
        if self.role != "assistant":
            refuse_part(INPUT_PARTS, "refusal", path)
        return {"type": "refusal", "refusal": part.refusal}


class FunctionCallItem(ConversationItem, tag="function_call", kw_only=True, frozen=True):
    """A call of an earlier answer."""

    adapt: ClassVar[Adapt | None] = arguments_adapted
    call_id: str
    name: str
    arguments: JsonText
    namespace: str | None = None

    def stored(self, path: str) -> Json:
        arguments_of(self.arguments, f"{path}.arguments")
        call = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        within = {} if self.namespace is None else {"namespace": self.namespace}
        return self.head() | call | within


NOT_PARTS = says("{path} must be an array of parts, not {type}", "invalid_type")


def _reasoning_adapted(value: Json, skip: Skip) -> Json:
    """Read other servers' forms: plain text, and texts of other types."""
    return value | {
        name: _texts(value[name], kind, partial(skip, name))
        for name, kind in (("summary", "summary_text"), ("content", "reasoning_text"))
        if value.get(name) is not None
    }


def _texts(value: Any, kind: str, skip: Callable[[], None]) -> Any:
    if not isinstance(value, str | list):
        return value
    inside = [value] if isinstance(value, str) else value
    texts = [part.get("text") if isinstance(part, dict) else part for part in inside]
    if not all(isinstance(text, str) for text in texts):
        skip()
    return [{"type": kind, "text": text} for text in texts if isinstance(text, str)]


class ReasoningItem(ConversationItem, tag="reasoning", kw_only=True, frozen=True):
    """Reasoning of an earlier answer."""

    adapt: ClassVar[Adapt | None] = _reasoning_adapted
    summary: (
        Annotated[list[Annotated[SummaryText, not_a_part("summary_text")]], NOT_PARTS] | None
    ) = None
    content: (
        Annotated[list[Annotated[ReasoningText, not_a_part("reasoning_text")]], NOT_PARTS] | None
    ) = None

    def stored(self, _: str) -> Json:
        summary = [{"type": "summary_text", "text": part.text} for part in self.summary or ()]
        content = [{"type": "reasoning_text", "text": part.text} for part in self.content or ()]
        return self.head() | {"summary": summary, "content": content}


class ItemReference(SentBack, tag="item_reference", frozen=True):
    """An item that is stored here."""

    may_lack_tag: ClassVar[bool] = True
    id: str


Item = (
    InputMessage
    | FunctionCallItem
    | FunctionCallOutputItem
    | ReasoningItem
    | CallItem
    | CallOutputItem
    | ItemReference
)
KINDS = ("message", "reasoning", *CALLS, *OUTPUTS, "item_reference")
PATCH_OUTPUT = "apply_patch_call_output"
"""Items whose status is content: whether a patch could be applied."""
TOOL_ITEMS = ("additional_tools", "tool_search_output")


def explain_item(value: Any, path: str) -> None:
    if not isinstance(value, dict):
        return
    kind = value.get("type")
    if kind not in KINDS:
        raise bad_request(
            f"{path}: items of type {kind!r} are not supported here",
            f"{path}.type",
            "unsupported_item",
        )
    if kind == "message" and isinstance(value.get("content"), list):
        known = (*PARTS, "refusal") if value.get("role") == "assistant" else INPUT_PARTS
        for index, part in enumerate(value["content"]):
            part_kind = part.get("type") if isinstance(part, dict) else None
            if part_kind not in known:
                refuse_part(known, part_kind, f"{path}.content.{index}")


Input = str | Annotated[list[Annotated[Item, explains(explain_item)]], Meta(max_length=MAX_ITEMS)]


def with_types(value: Any) -> Any:
    """Add the types that messages and references may omit."""
    return [_with_type(item) for item in value] if isinstance(value, list) else value


def _with_type(item: Any) -> Any:
    if not isinstance(item, dict) or item.get("type") is not None:
        return item
    return item | {"type": "item_reference" if item.get("role") is None else "message"}


def _with_id(item: Any, skip: Skip) -> Any:
    """Drop ids that are empty or very long, as of other servers: only references need one."""
    item_id = item.get("id") if isinstance(item, dict) else None
    if item_id is None or (isinstance(item_id, str) and 0 < len(item_id) <= MAX_ID):
        return item
    skip("input.id")
    return {name: value for name, value in item.items() if name != "id"}


def _with_known_status(item: Any, skip: Skip) -> Any:
    """Drop statuses of other servers, which mean nothing to a model."""
    if not isinstance(item, dict) or item.get("type") == PATCH_OUTPUT:
        return item
    return known_value("status", STATUSES, item, lambda name: skip(f"input.{name}"))


def known_items(value: Any, skip: Skip) -> tuple[Any, list[Any]]:
    """Return the input without unknown items (of tools that run elsewhere) and unread parts of
    content, and the tools that items offer."""
    if not isinstance(value, list):
        return value, []
    kept: list[Any] = []
    tools: list[Any] = []
    for item in value:
        kind = item.get("type") if isinstance(item, dict) else None
        if not isinstance(kind, str) or kind in KINDS:
            kept.append(_with_id(_with_known_status(item_adapted(item, skip), skip), skip))
        elif kind in TOOL_ITEMS and isinstance(item.get("tools"), list):
            tools += item["tools"]
        else:
            skip(f"input.{safe_name(kind)}")
    return kept, tools


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
        raise RequestFailed(Problem(404, detail, param=path, code="item_not_found"))
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


EARLIER = "previous_response_id"
"""Path of images in items before `input`."""


def messages_of(
    instructions: str | None,
    items: Sequence[Json],
    tools: Tools = NO_TOOLS,
    images: ImageParts | None = None,
    *,
    earlier: int = 0,
) -> tuple[Json, ...]:
    """Convert items to chat messages, one per turn of reasoning, text and calls. `tools` are the
    tools offered now, under the names in earlier calls. `images` reads the images; the first
    `earlier` items come before the request's `input`. Raises `RequestFailed` (400)."""
    images = ImageParts() if images is None else images
    messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    turn: Json | None = None
    """The assistant message that the next items may extend."""
    for index, item in enumerate(items, -earlier):
        path = f"input.{index}" if index >= 0 else EARLIER
        match item["type"]:
            case "message" if item["role"] != "assistant":
                turn = None
                role = "system" if item["role"] == "developer" else item["role"]
                content = _content(item["content"], role, f"{path}.content", images)
                messages.append({"role": role, "content": content})
            case kind if kind in OUTPUTS:
                turn = None
                content = _content(output_parts(item), "tool", f"{path}.output", images)
                messages.append(
                    {"role": "tool", "content": content, "tool_call_id": item["call_id"]}
                )
            case "reasoning" if not _thought(item):
                pass  # Another server has encrypted it.
            case kind:
                if turn is None or not _continues(turn, kind):
                    turn = {"role": "assistant", "content": ""}
                    messages.append(turn)
                _extend(turn, item, tools)
    return tuple(messages)


def _content(content: Sequence[Json], role: str, path: str, images: ImageParts) -> str | list[Json]:
    return content_of(
        _piece(part, role, path if path.startswith(EARLIER) else f"{path}.{index}", images)
        for index, part in enumerate(content)
    )


def _piece(part: Json, role: str, path: str, images: ImageParts) -> str | Json:
    if part["type"] != "input_image":
        return _text([part])
    if not images.takes(role, "input_image"):
        return PLACEHOLDER
    return images.add(fields_of(part), path)


def has_images(items: Iterable[Json]) -> bool:
    return any(part.get("type") == "input_image" for item in items for part in _content_of(item))


def _content_of(item: Json) -> list[Json]:
    content = item.get("content" if item["type"] == "message" else "output")
    return content if isinstance(content, list) else []


def with_placeholders(items: Iterable[Json], roles: Collection[str]) -> tuple[Json, ...]:
    """Return items as stored: placeholders for the images of roles that the model does not read."""
    return tuple(_with_placeholders(item, roles) for item in items)


def _with_placeholders(item: Json, roles: Collection[str]) -> Json:
    role, name = (item["role"], "content") if item["type"] == "message" else ("tool", "output")
    if role in roles or not has_images([item]):
        return item
    return item | {
        name: [
            input_text(PLACEHOLDER) if part.get("type") == "input_image" else part
            for part in _content_of(item)
        ]
    }


def with_files(items: Iterable[Json], images: Iterable[ImageSource]) -> tuple[Json, ...]:
    """Return items as stored: the files that were fetched in place of their addresses."""
    files = {image.origin: image.data for image in images}
    return tuple(_with_files(item, f"input.{index}", files) for index, item in enumerate(items))


def _with_files(item: Json, path: str, files: Mapping[str, bytes]) -> Json:
    if not has_images([item]):
        return item
    name = "content" if item["type"] == "message" else "output"
    content = [
        part | {"image_url": data_url(files[f"{path}.{name}.{index}"])}
        if _is_remote(part)
        else part
        for index, part in enumerate(_content_of(item))
    ]
    return item | {name: content}


def _is_remote(part: Json) -> bool:
    url = fields_of(part).get("url")
    return part["type"] == "input_image" and isinstance(url, str) and is_remote(url)


def _continues(turn: Json, kind: str) -> bool:
    """Whether an item extends the open message: reasoning, then text, then calls."""
    return kind in CALLS or not (turn["content"] or "tool_calls" in turn)


def _extend(turn: Json, item: Json, tools: Tools) -> None:
    match item["type"]:
        case "message":
            turn["content"] = _text(item["content"])
        case "reasoning":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + _thought(item)
        case _:
            function = {"name": tools.called(tool_of(item)), "arguments": arguments_of_item(item)}
            call = {"id": item["call_id"], "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)


def _thought(item: Json) -> str:
    return _text(item["content"] or item["summary"])


def _text(parts: Iterable[Json]) -> str:
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)
