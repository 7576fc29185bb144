"""Image files that are made to break the server that reads them: mutants of good files, bombs, and
rare but valid ones."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from random import Random

import attrs
import numpy as np
from PIL import Image

from tests.image_files import FORMATS, bomb, encoded, mutated, picture, png, png_chunk, turned
from trouper.protocol.media import ImageFormat

DECODED = ""
"""In place of a code: the image was shown to the model."""
DAMAGED, FORMAT, LARGE = "image_damaged", "image_format", "image_too_large"
CRASHES = "image_crashes_decoder"
OF_MUTANTS = frozenset({DECODED, DAMAGED, FORMAT, LARGE, CRASHES})
SIZE = (40, 30)


@attrs.frozen
class ImageCase:
    """`codes`: what may become of it."""

    name: str
    data: Callable[[], bytes]
    codes: frozenset[str] = frozenset({DECODED})


# -- good files ----------------------------------------------------------------------------------


def _frames(count: int, size: tuple[int, int] = SIZE) -> list[Image.Image]:
    return [picture(*size, seed=seed) for seed in range(count)]


def animated(format: ImageFormat, count: int, size: tuple[int, int] = SIZE) -> bytes:
    first, *others = _frames(count, size)
    return encoded(first, format, save_all=True, append_images=others)


def grey_of_16_bits() -> bytes:
    rows, columns = np.mgrid[0:30, 0:40]
    return encoded(Image.fromarray((rows * 2000 + columns * 100).astype(np.uint16)), "png")


def palette_with_alpha() -> bytes:
    image = picture(*SIZE).quantize(16)
    return encoded(image, "png", transparency=bytes(range(0, 256, 16)))


@cache
def good_files() -> dict[ImageFormat, Sequence[bytes]]:
    """By format: several variants of each."""
    plain = picture(*SIZE)
    return {
        "png": (
            encoded(plain, "png", exif=turned(6)),
            encoded(plain.convert("L"), "png"),
            grey_of_16_bits(),
            palette_with_alpha(),
            encoded(plain.convert("RGBA"), "png"),
            animated("png", 3),
        ),
        "jpeg": (
            encoded(plain, "jpeg", exif=turned(5)),
            encoded(plain, "jpeg", progressive=True),
            encoded(plain.convert("CMYK"), "jpeg"),
            encoded(plain.convert("L"), "jpeg"),
        ),
        "webp": (
            encoded(plain, "webp", exif=turned(3)),
            encoded(plain, "webp", lossless=True),
            encoded(plain.convert("RGBA"), "webp"),
            animated("webp", 3),
        ),
        "gif": (encoded(plain, "gif"), encoded(plain, "gif", transparency=1), animated("gif", 3)),
    }


# -- mutants -------------------------------------------------------------------------------------

MUTATED: tuple[ImageFormat, ...] = ("png", "jpeg", "webp", "gif")
Field = tuple[int, int]
"""Offset and bytes of a number in a file: a length, a size, a depth."""


def fields_of(format: ImageFormat, data: bytes) -> list[Field]:
    return [*_FIELDS[format](data)]


def _png_fields(data: bytes) -> Iterator[Field]:
    yield from ((16, 4), (20, 4), (24, 1), (25, 1), (28, 1))
    for start, _ in png_chunks(data):
        yield (start, 4)


def png_chunks(data: bytes) -> Iterator[tuple[int, int]]:
    """Start of each chunk, and bytes of its content."""
    at = 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        yield at, length
        at += length + 12


def _jpeg_fields(data: bytes) -> Iterator[Field]:
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        yield (at + 2, 2)
        if 0xC0 <= marker <= 0xCF and marker != 0xC4:
            yield from ((at + 4, 1), (at + 5, 2), (at + 7, 2), (at + 9, 1), (at + 11, 1))
        if marker in (0xC4, 0xDB, 0xDA):
            yield from ((at + 4 + step, 1) for step in range(5))
        at += 2 + length


def _webp_fields(data: bytes) -> Iterator[Field]:
    yield (4, 4)
    at = 12
    while at + 8 <= len(data):
        kind, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        yield (at + 4, 4)
        if kind == b"VP8X":
            yield from ((at + 8, 1), (at + 12, 3), (at + 15, 3))
        elif kind == b"ANMF":
            yield from ((at + 8 + step, 3) for step in (0, 3, 6, 9))
        elif kind in (b"VP8 ", b"VP8L"):
            yield from ((at + 8, 1), (at + 9, 4), (at + 14, 2), (at + 16, 2))
        at += 8 + length + length % 2


def _gif_fields(data: bytes) -> Iterator[Field]:
    yield from ((6, 2), (8, 2), (10, 1))
    at = data.find(b",", 13)
    while at >= 0:
        yield from ((at + step, 2) for step in (1, 3, 5, 7))
        yield from ((at + step, 1) for step in (9, 10, 11))
        at = data.find(b",", at + 1)


_FIELDS: dict[ImageFormat, Callable[[bytes], Iterator[Field]]] = {
    "png": _png_fields,
    "jpeg": _jpeg_fields,
    "webp": _webp_fields,
    "gif": _gif_fields,
}


def with_checksums(data: bytes) -> bytes:
    """A PNG whose checksums are right, so that a decoder reads on."""
    copy = bytearray(data)
    for start, length in png_chunks(data):
        content = data[start + 4 : start + 8 + length]
        copy[start + 8 + length : start + 12 + length] = struct.pack(">I", zlib.crc32(content))
    return bytes(copy[: len(data)])


def mutants(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Names and files: formats take turns, and so do the ways to damage them."""
    random = Random(seed)
    for number in range(count):
        kind = MUTATED[number % len(MUTATED)]
        way, change = WAYS[number // len(MUTATED) % len(WAYS)]
        data = change(kind, random.choice(good_files()[kind]), random)
        if kind == "png" and random.random() < 0.7:
            data = with_checksums(data)
        yield f"{kind}, {way}, {number}", data


def _flip_bits(_: ImageFormat, data: bytes, random: Random) -> bytes:
    copy = bytearray(data)
    for __ in range(random.choice((1, 1, 2, 8, 64))):
        at = random.randrange(random.choice((64, len(copy))))
        copy[min(at, len(copy) - 1)] ^= 1 << random.randrange(8)
    return bytes(copy)


def _truncate(_: ImageFormat, data: bytes, random: Random) -> bytes:
    return data[: random.randrange(1, len(data))]


def _change_field(format: ImageFormat, data: bytes, random: Random) -> bytes:
    copy = bytearray(data)
    for _ in range(random.choice((1, 1, 2))):
        at, width = random.choice(fields_of(format, data))
        value = int.from_bytes(copy[at : at + width], "big")
        limit = 256**width
        others = (0, 1, limit - 1, limit // 2, value + 1, value - 1, random.randrange(limit))
        new = random.choice((*others, 2 ** random.randrange(8 * width))) % limit
        copy[at : at + width] = new.to_bytes(width, "big")
    return bytes(copy)


def _splice(_: ImageFormat, data: bytes, random: Random) -> bytes:
    [mutant] = mutated(data, 1, seed=random.randrange(2**32))
    return mutant or b"\0"


WAYS: Sequence[tuple[str, Callable[[ImageFormat, bytes, Random], bytes]]] = (
    ("bits", _flip_bits),
    ("cut", _truncate),
    ("field", _change_field),
    ("spliced", _splice),
)

# -- bombs and rare files ------------------------------------------------------------------------


def gif_of_frames(count: int) -> bytes:
    """Each frame is one pixel, in 20 bytes."""
    frame = b",\0\0\0\0\1\0\1\0\0\2\2D\1\0"
    control = b"!\xf9\4\0\1\0\0\0"
    return b"GIF89a\1\0\1\0\x80\0\0\0\0\0\xff\xff\xff" + (control + frame) * count + b";"


def gif_that_claims(width: int, height: int) -> bytes:
    head = struct.pack("<HH", width, height)
    frame = b"," + bytes(4) + head + b"\0\2\2D\1\0"
    return b"GIF89a" + head + b"\x80\0\0\0\0\0\xff\xff\xff" + frame + b";"


def webp_that_claims(width: int, height: int) -> bytes:
    """An extended header before a small picture."""
    inner = encoded(picture(*SIZE), "webp")[12:]
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + size + inner
    return b"RIFF" + struct.pack("<I", len(body)) + body


def jpeg_that_claims(width: int, height: int) -> bytes:
    data = bytearray(encoded(picture(*SIZE), "jpeg"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def jpeg_of_scans(side: int, count: int) -> bytes:
    """Progressive; its last scan stands there so many times, and each goes over all pixels."""
    data = encoded(Image.new("L", (side, side), 128), "jpeg", progressive=True)
    at = data.rindex(b"\xff\xda")
    return data[:at] + data[at:-2] * count + data[-2:]


def png_with_text(size: int) -> bytes:
    """Compressed text, which unpacks to so many bytes."""
    text = b"Comment\0\0" + zlib.compress(bytes(size), 9)
    good = encoded(picture(*SIZE), "png")
    return good[:33] + png_chunk(b"zTXt", text) + good[33:]


def png_with_more_pixels(factor: int) -> bytes:
    """Its data unpacks to more than its size needs."""
    rows = bytes(2 * 8) * factor
    return png(8, 8, png_chunk(b"IDAT", zlib.compress(rows, 9)))


def png_of_chunks(count: int) -> bytes:
    good = encoded(picture(*SIZE), "png")
    return good[:33] + png_chunk(b"teSt", b"") * count + good[33:]


def turned_file(format: ImageFormat, orientation: int) -> bytes:
    return encoded(picture(*SIZE), format, exif=turned(orientation))


def of_mode(mode: str, format: ImageFormat) -> bytes:
    return encoded(picture(*SIZE).convert(mode), format)


def of_size(width: int, height: int, format: ImageFormat) -> bytes:
    return encoded(picture(width, height), format)


REFUSED = frozenset({LARGE})
EITHER = frozenset({DECODED, DAMAGED})
TURNED: tuple[ImageFormat, ...] = ("png", "jpeg", "webp", "avif")
ANIMATED: tuple[ImageFormat, ...] = ("png", "webp", "gif", "avif")
RARE: tuple[ImageCase, ...] = (
    *(
        ImageCase(f"{kind}, orientation {turn}", partial(turned_file, kind, turn))
        for kind in TURNED
        for turn in range(1, 9)
    ),
    ImageCase("CMYK", partial(of_mode, "CMYK", "jpeg")),
    ImageCase("16 bits of grey", grey_of_16_bits),
    ImageCase("a palette with alpha", palette_with_alpha),
    *(ImageCase(f"PNG of mode {mode}", partial(of_mode, mode, "png")) for mode in ("1", "LA", "P")),
    ImageCase("BMP", partial(of_mode, "RGB", "bmp")),
    *(ImageCase(f"animated {kind}", partial(animated, kind, 20)) for kind in ANIMATED),
    *(ImageCase(f"1 x 1, {kind}", partial(of_size, 1, 1, kind)) for kind in FORMATS),
    ImageCase("16,384 x 82", partial(of_size, 16_384, 82, "png")),
    ImageCase("16,384 x 1", partial(of_size, 16_384, 1, "png"), REFUSED),
    ImageCase("1 x 16,384", partial(of_size, 1, 16_384, "png"), REFUSED),
    ImageCase("16,385 x 90", partial(of_size, 16_385, 90, "png"), REFUSED),
)
BOMBS: tuple[ImageCase, ...] = (
    ImageCase("PNG of 400 megapixels", partial(bomb, 16_384, 24_415), REFUSED),
    ImageCase("PNG of 64 megapixels", partial(bomb, 8192, 8192)),
    ImageCase("PNG that claims 2**31", partial(png, 2**31 - 1, 2**31 - 1), REFUSED),
    ImageCase("PNG with 100 MB of text", partial(png_with_text, 10**8), EITHER),
    ImageCase("PNG with 100 MB of pixels for 64", partial(png_with_more_pixels, 6 * 10**6), EITHER),
    ImageCase("PNG of 100,000 chunks", partial(png_of_chunks, 100_000)),
    ImageCase("WebP that claims 2**48", partial(webp_that_claims, 2**24, 2**24), REFUSED),
    ImageCase(
        "WebP that claims 64 megapixels",
        partial(webp_that_claims, 8000, 8000),
        frozenset({DAMAGED}),
    ),
    ImageCase("WebP of 500 frames", partial(animated, "webp", 500, (4, 4))),
    ImageCase("GIF that claims 2**32", partial(gif_that_claims, 2**16 - 1, 2**16 - 1), REFUSED),
    ImageCase("GIF that claims 64 megapixels", partial(gif_that_claims, 8000, 8000), EITHER),
    ImageCase("GIF of 20,000 frames", partial(gif_of_frames, 20_000)),
    ImageCase("JPEG that claims 2**32", partial(jpeg_that_claims, 2**16 - 1, 2**16 - 1), REFUSED),
    ImageCase("JPEG that claims 64 megapixels", partial(jpeg_that_claims, 8000, 8000), EITHER),
    ImageCase(
        "JPEG of 2,000 scans of 16 megapixels",
        partial(jpeg_of_scans, 4096, 2000),
        frozenset({DECODED, CRASHES}),
    ),
    ImageCase("nothing but the beginning", lambda: b"\x89PNG\r\n\x1a\n", frozenset({DAMAGED})),
    ImageCase("no image", lambda: b"<html>", frozenset({FORMAT})),
)
