"""Parts of content in the forms of other APIs, for lenient readings.

What holds text is read as text. For the rest a placeholder stands, and it is named: one such part
would otherwise make every later request of its conversation fail.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import attrs

from trouper.web.http.leniency import Skip, messages_adapted, safe_name
from trouper.web.http.request_schema import Json

FILE = "[A file was sent here. This model reads text only.]"
"""The text that the model reads in the place of a file, a recording or a video."""
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that hold text, and where they hold it."""
IMAGES = ("image_url", "input_image", "image")
READ_ROLES = ("user", "tool", None)
"""Roles of what the model is to read; None: the result of a call. Of an earlier answer, what is no
text is left out."""


PLACES = {
    "message": "content",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
}
"""Types of items that hold parts, and where they hold them."""


@attrs.frozen
class PartTypes:
    """The types of a dialect."""

    known: Collection[str]
    """Those that it reads in messages of any role."""
    text: str
    image: str


CHAT = PartTypes(("text", "image_url"), "text", "image_url")
RESPONSES = PartTypes(
    ("input_text", "output_text", "refusal", "input_image"), "input_text", "input_image"
)
RESULTS = PartTypes(("input_text", "input_image"), "input_text", "input_image")
"""Of results of calls in the responses API."""


def parts_adapted(parts: Any, role: object, types: PartTypes, path: str, skip: Skip) -> Any:
    """Return the parts of a content in types that the dialect reads. What is no list is returned as
    it is."""
    if not isinstance(parts, list) or all(_is_plain(part, types) for part in parts):
        return parts
    return [adapted for part in parts for adapted in _read(part, role, types, path, skip)]


def chat_adapted(value: Json, skip: Skip) -> Json:
    """Return the body of a chat with parts that are read."""
    return messages_adapted(value, lambda message: _message(message, skip))


def _message(message: Any, skip: Skip) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    adapted = parts_adapted(content, message.get("role"), CHAT, "messages.content", skip)
    return message if adapted is content else message | {"content": adapted}


def item_adapted(item: Any, skip: Skip) -> Any:
    """Return an item of a responses conversation with parts that are read: a message's, or those of
    the result of a call."""
    name = PLACES.get(str(item.get("type"))) if isinstance(item, dict) else None
    if name is None or name not in item:
        return item
    role, types = (item.get("role"), RESPONSES) if name == "content" else (None, RESULTS)
    return item | {name: parts_adapted(item[name], role, types, f"input.{name}", skip)}


def _is_plain(part: Any, types: PartTypes) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return not isinstance(kind, str) or kind in types.known


def _read(part: Any, role: object, types: PartTypes, path: str, skip: Skip) -> list[Any]:
    if _is_plain(part, types):
        return [part]
    kind: str = part["type"]
    text = part.get(TEXTS[kind]) if kind in TEXTS else None
    if isinstance(text, str):
        return [{"type": types.text, "text": text}]
    if kind in IMAGES and role in READ_ROLES:
        return [{"type": types.image}]
    skip(f"{path}.{safe_name(kind)}")
    return [{"type": types.text, "text": FILE}] if role in READ_ROLES else []
