"""Messages of chat requests, and the messages that chat templates get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from msgspec import Meta

from trouper.protocol.problems import bad_request
from trouper.web.http.body_faults import says
from trouper.web.http.body_parsing import checked_text, json_type
from trouper.web.http.field_types import MAX_MESSAGES, Ignored, Text
from trouper.web.http.image_source import ImageField, ImageParts, content_of, fields_of
from trouper.web.http.leniency import Adapt, Skip
from trouper.web.http.request_body import SentBack
from trouper.web.http.request_schema import Json
from trouper.web.openai import schemas
from trouper.web.openai.chat_tools import PastCalls, past_calls
from trouper.web.openai.other_servers import PLACEHOLDER
from trouper.web.output.tool_calls import NO_TOOLS, Tools

NOT_TEXT = "{path} must be a string or an array of parts, not {type}"


class TextPart(SentBack, tag="text", frozen=True):
    """Text. Caching needs no marks."""

    text: Text
    cache_control: Ignored = None
    prompt_cache_breakpoint: Ignored = None


class ImagePart(SentBack, tag="image_url", frozen=True):
    """An image. If the model reads text only, a placeholder stands for the image."""

    image_url: ImageField = None
    cache_control: Ignored = None
    prompt_cache_breakpoint: Ignored = None


Parts = list[
    Annotated[
        TextPart | ImagePart,
        says(
            "{path}: only parts of type text and image_url are supported, not {tag!r}",
            "unsupported_content",
        ),
    ]
]
Content = Annotated[str | Parts, says(NOT_TEXT, "invalid_type")]


def _with_content(value: Json, _: Skip) -> Json:
    return value if value.get("content") is not None else value | {"content": ""}


def _answer_adapted(value: Json, _: Skip) -> Json:
    if value.get("content") is not None or value.get("tool_calls"):
        return value
    refusal = value.get("refusal")
    if not isinstance(refusal, str):
        return value | {"content": ""}
    return {name: inner for name, inner in value.items() if name != "refusal"} | {
        "content": refusal
    }


class _ChatMessage(SentBack, tag_field="role", frozen=True):
    essential: ClassVar[frozenset[str]] = frozenset({"images", "audio", "tool_calls"})
    content: Content
    name: str | None = None


class SystemMessage(_ChatMessage, tag="system", frozen=True):
    """Instructions."""


class DeveloperMessage(_ChatMessage, tag="developer", frozen=True):
    """Instructions, as newer clients call them."""


class UserMessage(_ChatMessage, tag="user", frozen=True):
    """A turn of the user."""


class ToolMessage(_ChatMessage, tag="tool", frozen=True):
    """The result of a call."""

    adapt: ClassVar[Adapt | None] = _with_content
    tool_call_id: str | None = None


class AssistantMessage(SentBack, tag_field="role", tag="assistant", frozen=True):
    """An earlier answer: text, calls of tools, or both."""

    rules: ClassVar[tuple[Json, ...]] = (schemas.CONTENT_OR_CALLS,)
    essential: ClassVar[frozenset[str]] = frozenset({"images", "audio", "function_call"})
    aliases: ClassVar[Mapping[str, str]] = {"reasoning": "reasoning_content"}
    adapt: ClassVar[Adapt | None] = _answer_adapted
    content: Content | None = None
    name: str | None = None
    tool_calls: PastCalls | None = None
    reasoning_content: str | None = None
    annotations: Ignored = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
ROLES: dict[type, str] = {
    SystemMessage: "system",
    DeveloperMessage: "system",  # Templates know no developer; newer clients do.
    UserMessage: "user",
    ToolMessage: "tool",
}
Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


def messages_of(
    messages: Sequence[ChatMessage], tools: Tools = NO_TOOLS, images: ImageParts | None = None
) -> tuple[Json, ...]:
    """`tools`: offered tools, by whose names the model knows earlier calls. `images` reads the
    images. Raises `RequestFailed` (400)."""
    images = ImageParts() if images is None else images
    return tuple(
        _plain(message, f"messages.{index}", tools, images)
        for index, message in enumerate(messages)
    )


def _plain(message: ChatMessage, path: str, tools: Tools, images: ImageParts) -> Json:
    if isinstance(message, AssistantMessage):
        return _answer(message, path, tools, images)
    role = ROLES[type(message)]
    plain: Json = {"role": role, "content": _content(message.content, path, role, images)}
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        plain["tool_call_id"] = checked_text(message.tool_call_id, f"{path}.tool_call_id")
    if message.name is not None:
        plain["name"] = checked_text(message.name, f"{path}.name")
    return plain


def _answer(message: AssistantMessage, path: str, tools: Tools, images: ImageParts) -> Json:
    if message.content is None and not message.tool_calls:
        detail = NOT_TEXT.format(path=f"{path}.content", type=json_type(None))
        raise bad_request(detail, f"{path}.content", "invalid_type")
    content = _content(message.content or "", path, "assistant", images)
    plain: Json = {"role": "assistant", "content": content}
    if message.tool_calls:
        plain["tool_calls"] = past_calls(message.tool_calls, f"{path}.tool_calls", tools)
    for name, value in (("reasoning_content", message.reasoning_content), ("name", message.name)):
        if value is not None:
            plain[name] = checked_text(value, f"{path}.{name}")
    return plain


def _content(
    content: str | Sequence[TextPart | ImagePart], path: str, role: str, images: ImageParts
) -> str | list[Json]:
    if isinstance(content, str):
        return checked_text(content, f"{path}.content")
    return content_of(
        _piece(part, f"{path}.content.{index}", role, images) for index, part in enumerate(content)
    )


def _piece(part: TextPart | ImagePart, path: str, role: str, images: ImageParts) -> str | Json:
    if isinstance(part, TextPart):
        return checked_text(part.text, f"{path}.text")
    if not images.takes(role, "image_url"):
        return PLACEHOLDER
    return images.add(fields_of({"image_url": part.image_url}), path)
