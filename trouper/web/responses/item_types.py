"""Types of the items of a responses conversation, and their form in the store, with ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from msgspec import Meta

from trouper.protocol.problems import bad_request
from trouper.web.http.body_faults import explains, says
from trouper.web.http.body_parsing import json_type
from trouper.web.http.field_types import Ignored, JsonText
from trouper.web.http.image_placeholder import PLACEHOLDER, names_of
from trouper.web.http.leniency import Adapt
from trouper.web.http.request_body import SentBack
from trouper.web.openai.chat_tools import arguments_adapted, arguments_of
from trouper.web.output.dialect import Json
from trouper.web.responses.schemas import REFUSALS_ARE_ANSWERS, STATUSES

MAX_ITEMS = 10_000
MAX_ID = 128
ItemId = Annotated[str, says(f"{{path}} must be a string of 1 to {MAX_ID} characters", min_length=1, max_length=MAX_ID)]
Status = Annotated[
    Literal["completed", "incomplete", "in_progress"], says(f"{{path}} must be one of {', '.join(STATUSES)}")
]
PARTS = ("input_text", "output_text")
INPUT_PARTS = (*PARTS, "input_image")
NOT_A_PART = "{path}: only parts of type {known} are supported, not {tag!r}"


def new_id(prefix: str) -> str:
    return prefix + uuid4().hex


def _part(kind: str) -> Meta:
    return says(NOT_A_PART.replace("{known}", kind), "unsupported_content")


def _refuse_part(known: Sequence[str], kind: Any, path: str) -> None:
    message = NOT_A_PART.format(path=path, tag=kind, known=" or ".join(known))
    raise bad_request(message, path, "unsupported_content")


def _input_text(text: str) -> Json:
    return {"type": "input_text", "text": text}


def text_part(text: str, logprobs: Sequence[Json] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


class InputText(SentBack, tag="input_text", frozen=True):
    """Text of a prompt."""

    text: str
    prompt_cache_breakpoint: Ignored = None


class InputImage(SentBack, tag="input_image", frozen=True):
    """An image. The model reads text only, so a placeholder stands for it, also in what is stored."""

    image_url: Ignored = None
    file_id: Ignored = None
    detail: Ignored = None
    prompt_cache_breakpoint: Ignored = None


class OutputText(SentBack, tag="output_text", frozen=True):
    """Text of an answer. Annotations and logprobs are sent back from an earlier one."""

    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


class RefusalText(SentBack, tag="refusal", frozen=True):
    """Text of an answer that another server called a refusal."""

    refusal: str


class SummaryText(SentBack, tag="summary_text", frozen=True):
    """Summary of reasoning."""

    text: str


class ReasoningText(SentBack, tag="reasoning_text", frozen=True):
    """Text of reasoning."""

    text: str


class _Item(SentBack, kw_only=True, frozen=True):
    id: ItemId | None = None
    status: Status | None = None

    def head(self, kind: str, prefix: str) -> Json:
        """Return the fields that every item has. An item without an id gets one."""
        return {"id": self.id or new_id(prefix), "type": kind, "status": self.status or "completed"}


class InputMessage(_Item, tag="message", kw_only=True, frozen=True):
    """A message. `phase` holds nothing that a model could use."""

    may_lack_tag: ClassVar[bool] = True
    rules: ClassVar[tuple[Json, ...]] = (REFUSALS_ARE_ANSWERS,)
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
        """Return the item as it is stored. Raises `RequestFailed` (400), as in the other types of items."""
        parts: Sequence[InputText | OutputText | RefusalText | InputImage]
        parts = [InputText(self.content)] if isinstance(self.content, str) else self.content
        content = [self._part(part, f"{path}.content.{index}") for index, part in enumerate(parts)]
        return self.head("message", "msg_") | {"role": self.role, "content": content}

    def _part(self, part: InputText | OutputText | RefusalText | InputImage, path: str) -> Json:
        if isinstance(part, InputImage):
            if self.role == "assistant":
                _refuse_part((*PARTS, "refusal"), "input_image", path)
            return _input_text(PLACEHOLDER)
        if not isinstance(part, RefusalText):
            return text_part(part.text) if self.role == "assistant" else _input_text(part.text)
        if self.role != "assistant":
            _refuse_part(INPUT_PARTS, "refusal", path)
        return {"type": "refusal", "refusal": part.refusal}


class FunctionCallItem(_Item, tag="function_call", kw_only=True, frozen=True):
    """A call of an earlier answer."""

    adapt: ClassVar[Adapt | None] = arguments_adapted
    call_id: str
    name: str
    arguments: JsonText

    def stored(self, path: str) -> Json:
        arguments_of(self.arguments, f"{path}.arguments")
        call = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return self.head("function_call", "fc_") | call


class FunctionCallOutputItem(_Item, tag="function_call_output", kw_only=True, frozen=True):
    """The result of a call."""

    call_id: str
    output: Annotated[
        str | list[Annotated[InputText | InputImage, _part("input_text or input_image")]],
        says("{path} must be a string, not {type}", "invalid_type"),
    ]
    name: Ignored = None

    def stored(self, _: str) -> Json:
        output: str | list[Json]
        if isinstance(self.output, str):
            output = self.output
        else:
            output = [_input_text(PLACEHOLDER if isinstance(part, InputImage) else part.text) for part in self.output]
        return self.head("function_call_output", "fco_") | {"call_id": self.call_id, "output": output}


NOT_PARTS = says("{path} must be an array of parts, not {type}", "invalid_type")


class ReasoningItem(_Item, tag="reasoning", kw_only=True, frozen=True):
    """Reasoning of an earlier answer."""

    summary: Annotated[list[Annotated[SummaryText, _part("summary_text")]], NOT_PARTS] | None = None
    content: Annotated[list[Annotated[ReasoningText, _part("reasoning_text")]], NOT_PARTS] | None = None

    def stored(self, _: str) -> Json:
        summary = [{"type": "summary_text", "text": part.text} for part in self.summary or ()]
        content = [{"type": "reasoning_text", "text": part.text} for part in self.content or ()]
        return self.head("reasoning", "rs_") | {"summary": summary, "content": content}


class ItemReference(SentBack, tag="item_reference", frozen=True):
    """An item that is stored here."""

    may_lack_tag: ClassVar[bool] = True
    id: str


Item = InputMessage | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | ItemReference
KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def ignored_of(items: str | Sequence[Item] | None) -> tuple[str, ...]:
    """Return the types of parts that a placeholder stands for."""
    contents: list[Sequence[object]] = []
    for item in items if items is not None and not isinstance(items, str) else ():
        if isinstance(item, InputMessage):
            contents.append(item.content)
        elif isinstance(item, FunctionCallOutputItem):
            contents.append(item.output)
    return names_of((part for content in contents if isinstance(content, list) for part in content), InputImage)


def explain_input(value: Any, path: str) -> None:
    if not isinstance(value, str | list):
        detail = f"{path} must be a string or an array of items, not {json_type(value)}"
        raise bad_request(detail, path, "invalid_type")
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        raise bad_request(f"{path} may have {MAX_ITEMS} items, not {len(value)}", path, "invalid_value")


def explain_item(value: Any, path: str) -> None:
    if not isinstance(value, dict):
        return
    kind = value.get("type")
    if kind not in KINDS:
        raise bad_request(f"{path}: items of type {kind!r} are not supported here", f"{path}.type", "unsupported_item")
    if kind == "message" and isinstance(value.get("content"), list):
        known = (*PARTS, "refusal") if value.get("role") == "assistant" else INPUT_PARTS
        for index, part in enumerate(value["content"]):
            part_kind = part.get("type") if isinstance(part, dict) else None
            if part_kind not in known:
                _refuse_part(known, part_kind, f"{path}.content.{index}")


Input = Annotated[
    str | Annotated[list[Annotated[Item, explains(explain_item)]], Meta(max_length=MAX_ITEMS)],
    explains(explain_input),
]


def with_types(value: Any) -> Any:
    """Return the input with the types that messages and references may leave out."""
    return [_with_type(item) for item in value] if isinstance(value, list) else value


def _with_type(item: Any) -> Any:
    if not isinstance(item, dict) or item.get("type") is not None:
        return item
    return item | {"type": "item_reference" if item.get("role") is None else "message"}
