"""The images of a recorded request: their places, and their files."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from PIL import Image

from tests.scripted.process import recorded

APIS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
}
IMAGES = ("image", "image_url", "input_image")
RESULTS = ("tool_result", "function_call_output", "custom_tool_call_output")

MAX_DIFFERENCE = 2.0
"""Of a colour's 256 values, on average; JPEG of Qwen Code differs by 0.6."""


@attrs.frozen
class SentImage:
    location: str
    """API, part around it and type: "messages: tool_result, image"."""
    data: bytes = attrs.field(repr=False)


def sent_images(record: Path) -> list[SentImage]:
    """Of the requests of a session, each place once."""
    images: dict[SentImage, None] = {}
    for line in recorded(record):
        if line["path"] in APIS:
            body = json.loads(line["body"])
            for message in body.get("messages") or body.get("input") or ():
                kind = message.get("type", "message")
                around = f"{message.get('role')} message" if kind == "message" else kind
                images |= dict.fromkeys(_images(message, f"{APIS[line['path']]}: {around}"))
    return [*images]


def _images(value: Any, location: str) -> Iterator[SentImage]:
    if isinstance(value, list):
        for part in value:
            yield from _images(part, location)
    elif isinstance(value, dict):
        kind = value.get("type")
        if kind in IMAGES:
            yield SentImage(f"{location}, {kind}", _data(value))
            return
        if kind in RESULTS:
            location = f"{location.partition(':')[0]}: {kind}"
        for part in value.values():
            yield from _images(part, location)


def _data(part: Mapping[str, Any]) -> bytes:
    """The file of an image part; b"" if it comes by an address or by id."""
    source = part.get("source")
    if source is not None:
        return base64.b64decode(source.get("data", ""))
    url = part.get("image_url") or ""
    url = url if isinstance(url, str) else url["url"]
    head, _, text = url.partition(";base64,")
    return base64.b64decode(text) if head.startswith("data:image/") else b""


def opened(data: bytes) -> Image.Image:
    return Image.open(BytesIO(data))


def pixels_digest(data: bytes) -> str:
    """SHA-256 of a file's pixels, as a recorded server gives it for those that its engine got."""
    return sha256(opened(data).convert("RGB").tobytes()).hexdigest()


def looks_as(data: bytes, original: bytes) -> bool:
    """Whether a file shows the original, which an agent may have written anew as JPEG."""
    pictures = [np.asarray(opened(each).convert("RGB"), np.int16) for each in (data, original)]
    if pictures[0].shape != pictures[1].shape:
        return False
    return bool(np.abs(pictures[0] - pictures[1]).mean() < MAX_DIFFERENCE)


def engine_digests(record: Path) -> set[str]:
    """Of the pixels of all images that the engine got."""
    return {line["sha256"] for line in recorded(record, "image")}
