"""A model that takes images, without an encoder: its layout, tokenizer and engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from tests.fakes import ByteTokenizer, FakeEngine, card
from tests.image_files import encoded, picture
from trouper.protocol.media import Detail, ImageShape, ImageSize, MediaSpan
from trouper.protocol.model import LoadedModel

MARKER, PIXELS, ROW_END = 254, 253, 252
"""Tokens that no text in UTF-8 has."""
MARKER_TEXT = "<image>"
SIDE = 10
"""Pixels of a token's side."""
LOW = 2
"""Tokens of an image with `detail: low`, at limit."""


@attrs.frozen
class FakeLayout:
    """Each row of tokens ends with a break."""

    name: str = "fake-1"
    marker: str = MARKER_TEXT
    atomic: bool = False

    def shape(self, size: ImageSize, detail: Detail, max_tokens: int) -> ImageShape:
        rows, columns = -(-size.height // SIDE), -(-size.width // SIDE)
        limit = min(LOW, max_tokens) if detail == "low" else max_tokens
        while rows * (columns + 1) > limit:
            if rows == columns == 1:
                raise ValueError("the limit of tokens has no room for an image")
            rows, columns = max(1, rows - 1), max(1, columns - 1)
        return ImageShape((rows * SIDE, columns * SIDE), (1, rows, columns))

    def num_tokens(self, shape: ImageShape) -> int:
        _, rows, columns = shape.grid
        return rows * (columns + 1)

    def num_pieces(self, shape: ImageShape) -> int:
        return 4

    def span(self, start: int, shape: ImageShape, digest: bytes) -> MediaSpan:
        _, rows, columns = shape.grid
        tokens = (*(PIXELS,) * columns, ROW_END) * rows
        runs = tuple((row * (columns + 1), columns) for row in range(rows))
        return MediaSpan(start, tokens, runs, digest, shape, len(tokens), atomic=self.atomic)


class ImageTokenizer(ByteTokenizer):
    """Text is bytes, also where it is the marker's; a part of a message is the marker."""

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        return (MARKER,) if text == MARKER_TEXT else super().encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> tuple[int, ...]:
        tokens = list[int]()
        for message in messages:
            tokens += self.encode(f"<{message['role']}>")
            tokens += self._of_content(message["content"])
        return (*tokens, *self.encode("<assistant>"))

    def _of_content(self, content: str | list[dict[str, Any]]) -> Sequence[int]:
        if isinstance(content, str):
            return content.encode()
        pieces = [
            [MARKER] if part["type"] == "image" else [*part["text"].encode()] for part in content
        ]
        return [token for part in pieces for token in part]


@attrs.define(eq=False)
class SeeingEngine(FakeEngine):
    tokenizer: ByteTokenizer = attrs.field(factory=ImageTokenizer)
    image_roles: tuple[str, ...] = ("tool", "user")

    async def load(self) -> LoadedModel:
        seeing = attrs.evolve(card(kv=self.kv), images=FakeLayout(), image_roles=self.image_roles)
        return LoadedModel(seeing, self.tokenizer)


def shown(width: int, height: int) -> tuple[int, ...]:
    """The tokens of an image of this size."""
    rows, columns = -(-height // SIDE), -(-width // SIDE)
    return (*(PIXELS,) * columns, ROW_END) * rows


def png_file(width: int, height: int, seed: int = 0) -> bytes:
    return encoded(picture(width, height, seed), "png")
