"""Blocks of Anthropic's server tools, and documents, for lenient readings. All but text is skipped,
because an error would fail every later request of a conversation."""

from __future__ import annotations

from typing import Any

from trouper.web.http.leniency import Skip, messages_adapted, safe_name
from trouper.web.http.request_schema import Json

KNOWN = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
WITHIN = ("text", "image", "tool_reference")
UNREADABLE = "[a document that this text-only model cannot read]"


def blocks_adapted(value: Json, skip: Skip) -> Json:
    return messages_adapted(value, lambda message: _message(message, skip))


def _message(message: Any, skip: Skip) -> Any:
    known = (
        KNOWN.get(message["role"])
        if isinstance(message, dict) and isinstance(message.get("role"), str)
        else None
    )
    if known is None or not isinstance(message.get("content"), list):
        return message
    if all(_is_plain(block, known) for block in message["content"]):
        return message
    blocks = [
        read
        for block in message["content"]
        for read in _read(block, known, "messages.content", skip)
    ]
    return message | {"content": blocks}


def _is_plain(block: Any, known: tuple[str, ...]) -> bool:
    if not isinstance(block, dict):
        return True
    kind = block.get("type")
    return kind in known and (kind != "tool_result" or not isinstance(block.get("content"), list))


def _read(block: Any, known: tuple[str, ...], path: str, skip: Skip) -> list[Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "tool_result" and kind in known and isinstance(block.get("content"), list):
        inner = [
            read
            for part in block["content"]
            for read in _read(part, WITHIN, f"{path}.content", skip)
        ]
        return [block | {"content": inner}]
    if not isinstance(kind, str) or kind in known:
        return [block]
    text = _text_of(kind, block)
    if text is None:
        skip(f"{path}.{safe_name(kind)}")
        text = UNREADABLE if kind == "document" else ""
    return [{"type": "text", "text": text}] if text else []


def _text_of(kind: str, block: Json) -> str | None:
    source = block.get("source")
    if kind == "document" and isinstance(source, dict):
        if source.get("type") == "text" and isinstance(source.get("data"), str):
            return _titled(block, source["data"])
        inner = _joined(source.get("content")) if source.get("type") == "content" else None
        return None if inner is None else _titled(block, inner)
    if kind == "search_result":
        found = _joined(block.get("content"))
        origin = source if isinstance(source, str) else ""
        return None if found is None else _titled(block, "\n".join(filter(None, (origin, found))))
    if kind == "tool_reference" and isinstance(block.get("tool_name"), str):  # Outside of a result.
        return f"The tool {block['tool_name']} is available."
    return None


def _titled(block: Json, text: str) -> str:
    titles = (block.get("title"), block.get("context"))
    return "\n".join([*(title for title in titles if isinstance(title, str) and title), text])


def _joined(content: Any) -> str | None:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [
        part.get("text")
        for part in content
        if isinstance(part, dict) and part.get("type") == "text"
    ]
    return (
        "\n".join(text for text in texts if isinstance(text, str))
        if len(texts) == len(content)
        else None
    )
