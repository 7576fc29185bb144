"""Images for the fake engine: a layout, and images by number whose digests differ."""

from __future__ import annotations

import hashlib

import attrs

from trouper.protocol.media import (
    Detail,
    ImageShape,
    ImageSize,
    ImageSource,
    MediaSpan,
    PromptImage,
)

PATCH = 10
"""Pixels of a token's side."""
IMAGE_TOKEN = 200


class FakeLayout:
    """A token for each 10 x 10 pixels, and nothing around them."""

    name = "fake"
    marker = "<image>"

    def shape(self, size: ImageSize, detail: Detail, max_tokens: int) -> ImageShape:
        rows, columns = -(-size.height // PATCH), -(-size.width // PATCH)
        while rows * columns > max_tokens:
            rows, columns = -(-rows // 2), -(-columns // 2)
        return ImageShape((rows * PATCH, columns * PATCH), (1, rows, columns))

    def num_tokens(self, shape: ImageShape) -> int:
        return shape.grid[1] * shape.grid[2]

    def num_pieces(self, shape: ImageShape) -> int:
        return 4

    def span(self, start: int, shape: ImageShape, digest: bytes) -> MediaSpan:
        count = self.num_tokens(shape)
        return MediaSpan(
            start=start,
            tokens=(IMAGE_TOKEN,) * count,
            embedded=((0, count),),
            digest=digest,
            shape=shape,
            extent=count,
        )


def image(number: int, start: int, tokens: int, *, atomic: bool = False) -> PromptImage:
    """The image of this number, as one row of so many tokens."""
    data = f"image {number}".encode()
    shape = ImageShape((PATCH, PATCH * tokens), (1, 1, tokens))
    digest = hashlib.sha256(data).digest()
    source = ImageSource(data, f"messages.0.content.{number}")
    span = FakeLayout().span(start, shape, digest)
    return PromptImage(attrs.evolve(span, atomic=atomic), source)


Part = tuple[int, ...] | tuple[str, int, int]
"""Tokens of a text, or ("image", number, tokens), or ("atomic", number, tokens)."""


def prompt_of(*contents: Part) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """A prompt's tokens and images."""
    prompt: tuple[int, ...] = ()
    images: list[PromptImage] = []
    for content in contents:
        if content and content[0] in ("image", "atomic"):
            kind, number, tokens = content
            where = len(prompt), int(tokens)
            images.append(image(int(number), *where, atomic=kind == "atomic"))
            prompt += images[-1].span.tokens
        else:
            prompt += tuple(int(token) for token in content)
    return prompt, tuple(images)
