"""Images of requests: the file, its place in a prompt, its pixels (docs/images.md)."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Literal, NewType, Protocol

import attrs

ItemId = NewType("ItemId", int)
"""Id of an image that the engine encodes or has encoded; never reused."""
Detail = Literal["auto", "low", "high"]
"""OpenAI's `detail`: a bound on the tokens of an image."""
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
"""Pillow's numbers of filters."""
CHANNELS = 3
"""Of a pixel: red, green, blue."""
ImageFormat = Literal["png", "jpeg", "webp", "gif", "bmp", "avif"]


@attrs.frozen(eq=False)
class ImageSource:
    """An image file as a client sent it."""

    data: bytes = attrs.field(repr=False)
    origin: str
    """Place in the client's body, for errors: `messages.3.content.1`."""
    detail: Detail = "auto"


@attrs.frozen
class ImageSize:
    """Facts from a file's header. `width` and `height` in pixels, as seen: after the
    orientation."""

    width: int
    height: int
    format: ImageFormat


@attrs.frozen
class ImageShape:
    """Shape of an image for one model. Sizes are (height, width) in pixels."""

    resized: tuple[int, int]
    grid: tuple[int, int, int]
    """(frames, rows, columns) of embedded tokens; with tiles, of one tile."""
    tiles: tuple[int, int] = (1, 1)
    """(rows, columns) of the equal parts that `resized` is cut into."""
    scaled: tuple[int, int] | None = None
    """Upper left part of `resized` that the image fills, before black; None: all of it."""
    overview: tuple[int, int] | None = None
    """Size of the whole image once more, behind the tiles."""
    resample: int = BICUBIC
    """Pillow's number of the filter."""

    @property
    def view_tokens(self) -> int:
        """Embedded ones of one tile; without tiles, of the image."""
        _, rows, columns = self.grid
        return rows * columns

    @property
    def num_bytes(self) -> int:
        """Of the pixels, with the overview's."""
        sizes = self.resized, self.overview or (0, 0)
        return sum(CHANNELS * height * width for height, width in sizes)


# The span's tokens are ordinary ids of the family's vocabulary; the engine puts the encoder's
# vectors in the place of their embeddings. The prefix cache sees identity tokens in their place,
# made from the image's digest.
@attrs.frozen
class MediaSpan:
    """The tokens of one image in a prompt."""

    start: int
    """Index of the first token in the prompt."""
    tokens: tuple[int, ...]
    """The prompt's ids, with row breaks and separators of the family."""
    embedded: tuple[tuple[int, int], ...]
    """Runs (offset in the span, length) of tokens that get the encoder's vectors."""
    digest: bytes
    """SHA-256 of the file's bytes and of all that shapes its tokens."""
    shape: ImageShape
    extent: int
    """Positions by which the tokens behind the span advance; the number of tokens, except with
    M-RoPE."""
    atomic: bool = False
    """Whether embedded tokens attend to later ones of their run: then no chunk ends in the span."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def num_embedded(self) -> int:
        return sum(length for _, length in self.embedded)


@attrs.frozen(eq=False)
class PromptImage:
    span: MediaSpan
    source: ImageSource


@attrs.frozen(eq=False)
class Pixels:
    """Decoded and resized, for the encoder. `rgb`: uint8 (height, width, 3), row by row."""

    height: int
    width: int
    rgb: bytes = attrs.field(repr=False)
    overview: Pixels | None = None
    """The whole image once more, if the rest is cut into tiles."""

    @classmethod
    def of(cls, shape: ImageShape, rgb: bytes) -> Pixels:
        """`rgb`: `shape.num_bytes`, the overview's last."""
        height, width = shape.resized
        length = CHANNELS * height * width
        overview = None if shape.overview is None else cls(*shape.overview, rgb[length:])
        return cls(height, width, rgb[:length], overview)


class ImageLayout(Protocol):
    """Token counts and spans of one model's images. Pure integers, safe from any thread."""

    @property
    def name(self) -> str:
        """Family and version of the rules, which are part of each digest."""

    @property
    def marker(self) -> str:
        """Text that the chat template writes for an image, and that `span` replaces."""

    def shape(self, size: ImageSize, detail: Detail, max_tokens: int) -> ImageShape:
        """Resize an image of this size. Raises `ValueError` if it cannot have a shape."""

    def num_tokens(self, shape: ImageShape) -> int: ...

    def num_pieces(self, shape: ImageShape) -> int:
        """Number of parts in which the encoder can run: layers, or some patches of a layer."""

    def span(self, start: int, shape: ImageShape, digest: bytes) -> MediaSpan: ...


@attrs.frozen
class DecodeImage:
    """Order to decode the file of an item, and to resize it to `shape.resized`."""

    item: ItemId
    source: ImageSource
    shape: ImageShape


@attrs.frozen(eq=False)
class ImageDecoded:
    """Answer to `DecodeImage`. `fault`: why there are no pixels; for the client."""

    item: ItemId
    pixels: Pixels | None = None
    fault: str = ""
    code: str = "image_damaged"
    seconds: float = 0.0
    """Time that the decoder took, also in vain."""


def chunk_end(spans: Iterable[MediaSpan], start: int, end: int) -> int:
    """Where a chunk from token `start` to about `end` may end: not inside an atomic span, but at
    its start, or, of a chunk that begins there or inside, at its end. `spans`: ascending."""
    for span in spans:
        if span.atomic and span.start < end < span.end:
            return span.start if span.start > start else span.end
    return end


def count_positions(spans: tuple[MediaSpan, ...], tokens: int) -> int:
    """Position of the token at index `tokens`, which lies in no span."""
    return tokens + sum(span.extent - len(span.tokens) for span in spans if span.end <= tokens)


def digest_image(layout: str, shape: ImageShape, data: bytes) -> bytes:
    """SHA-256 of a layout's name, a shape and a file's bytes. Decoded pixels would cost a
    decode."""
    digest = sha256(f"{layout}\0{shape.resized}\0{shape.grid}\0".encode())
    more = shape.tiles, shape.scaled, shape.overview, shape.resample
    if more != ((1, 1), None, None, BICUBIC):
        digest.update(f"{more}\0".encode())
    digest.update(data)
    return digest.digest()
