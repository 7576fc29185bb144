"""The base of all items of a responses conversation, and the parts of their content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal
from uuid import uuid4

from msgspec import Meta

from trouper.protocol.problems import bad_request
from trouper.web.http.body_faults import says
from trouper.web.http.field_types import Ignored
from trouper.web.http.request_body import SentBack
from trouper.web.output.dialect import Json
from trouper.web.responses.schemas import STATUSES

MAX_ID = 128
ItemId = Annotated[
    str,
    says(f"{{path}} must be a string of 1 to {MAX_ID} characters", min_length=1, max_length=MAX_ID),
]
Status = Annotated[
    Literal["completed", "incomplete", "in_progress"],
    says(f"{{path}} must be one of {', '.join(STATUSES)}"),
]
PARTS = ("input_text", "output_text")
INPUT_PARTS = (*PARTS, "input_image")
NOT_A_PART = "{path}: only parts of type {known} are supported, not {tag!r}"


def new_id(prefix: str) -> str:
    return prefix + uuid4().hex


def not_a_part(kind: str) -> Meta:
    return says(NOT_A_PART.replace("{known}", kind), "unsupported_content")


def refuse_part(known: Sequence[str], kind: Any, path: str) -> None:
    message = NOT_A_PART.format(path=path, tag=kind, known=" or ".join(known))
    raise bad_request(message, path, "unsupported_content")


def input_text(text: str) -> Json:
    return {"type": "input_text", "text": text}


def text_part(text: str, logprobs: Sequence[Json] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


class InputText(SentBack, tag="input_text", frozen=True):
    """Text of a prompt."""

    text: str
    prompt_cache_breakpoint: Ignored = None


class InputImage(SentBack, tag="input_image", frozen=True):
    """An image. The model reads text only, so a placeholder stands for it, also in what is
    stored."""

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


class ConversationItem(SentBack, kw_only=True, frozen=True):
    """An item with an id and a status."""

    id: ItemId | None = None
    status: Status | None = None

    def head(self, kind: str, prefix: str) -> Json:
        """Return the fields that every item has. An item without an id gets one."""
        return {"id": self.id or new_id(prefix), "type": kind, "status": self.status or "completed"}
