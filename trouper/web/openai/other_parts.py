"""Content parts of other APIs, for lenient readings. A placeholder stands for all but text, because
an error would fail every later request of a conversation."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import attrs

from trouper.web.http.leniency import Skip, messages_adapted, safe_name
from trouper.web.http.request_schema import Json

FILE = "[A file was sent here. This model reads text only.]"
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Fields of the text, by type."""
IMAGES = ("image_url", "input_image", "image")
READ_ROLES = ("user", "tool", None)
"""None: the result of a call."""


PLACES = {
    "message": "content",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
}


@attrs.frozen
class PartTypes:
    known: Collection[str]
    """Types that messages of any role may have."""
    text: str
    image: str


CHAT = PartTypes(("text", "image_url"), "text", "image_url")
RESPONSES = PartTypes(
    ("input_text", "output_text", "refusal", "input_image"), "input_text", "input_image"
)
RESULTS = PartTypes(("input_text", "input_image"), "input_text", "input_image")


def parts_adapted(parts: Any, role: object, types: PartTypes, path: str, skip: Skip) -> Any:
    if not isinstance(parts, list) or all(_is_plain(part, types) for part in parts):
        return parts
    return [adapted for part in parts for adapted in _read(part, role, types, path, skip)]


def chat_adapted(value: Json, skip: Skip) -> Json:
    return messages_adapted(value, lambda message: _message(message, skip))


def _message(message: Any, skip: Skip) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    adapted = parts_adapted(content, message.get("role"), CHAT, "messages.content", skip)
    return message if adapted is content else message | {"content": adapted}


def item_adapted(item: Any, skip: Skip) -> Any:
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
