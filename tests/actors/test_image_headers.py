"""Sizes from headers, against Pillow's; damaged headers; limits before any decoding."""

from __future__ import annotations

import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tests.image_files import FORMATS, encoded, mutated, picture, png, png_chunk, turned
from tests.long_tests import PLAYED
from trouper.actors.runtime.image_headers import (
    MAX_PIXELS,
    MAX_SIDE,
    ImageRefused,
    read_header,
    read_size,
)
from trouper.protocol.media import ImageFormat, ImageSize

MUTANTS = 10_000 if PLAYED else 500
SIZES = ((1, 1), (1, 2), (7, 5), (64, 64), (301, 200), (129, 640))


def refusal(data: bytes) -> ImageRefused:
    with pytest.raises(ImageRefused) as refused:
        read_size(data)
    return refused.value


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_size_is_pillows(format: ImageFormat, size: tuple[int, int]) -> None:
    width, height = size
    assert read_size(encoded(picture(width, height), format)) == ImageSize(width, height, format)


@pytest.mark.parametrize(
    ("format", "mode", "options"),
    [
        ("png", "L", {}),
        ("png", "RGBA", {}),
        ("png", "I;16", {}),
        ("jpeg", "CMYK", {}),
        ("jpeg", "RGB", {"progressive": True}),
        ("jpeg", "RGB", {"comment": b"c" * 5000, "dpi": (72, 72)}),
        ("webp", "RGB", {"lossless": True}),
        ("webp", "RGBA", {"lossless": True}),
        ("webp", "RGBA", {}),
        ("gif", "P", {"comment": b"c" * 5000}),
        ("bmp", "1", {}),
        ("avif", "RGBA", {}),
    ],
    ids=str,
)
def test_the_size_is_pillows_in_every_mode(
    format: ImageFormat, mode: str, options: dict[str, object]
) -> None:
    grey = picture(61, 43).convert("L")
    image = grey.convert("I").convert("I;16") if mode == "I;16" else grey.convert(mode)
    assert read_size(encoded(image, format, **options)) == ImageSize(61, 43, format)


@pytest.mark.parametrize("format", ["png", "gif", "webp", "avif"])
def test_the_size_of_an_animation_is_that_of_its_first_frame(format: ImageFormat) -> None:
    frames = [picture(40, 30, seed) for seed in range(3)]
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:])
    assert read_size(data) == ImageSize(40, 30, format)


@pytest.mark.parametrize("format", ["png", "jpeg", "webp", "avif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_is_that_of_pillow(format: ImageFormat, orientation: int) -> None:
    data = encoded(picture(40, 30), format, exif=turned(orientation))
    with Image.open(io.BytesIO(data)) as opened:
        seen = ImageOps.exif_transpose(opened).size
    assert read_header(data).orientation == orientation
    assert read_size(data) == ImageSize(*seen, format)


def test_the_orientation_of_either_byte_order_is_read() -> None:
    for order, prefix in ((">", b"MM\0*"), ("<", b"II*\0")):
        exif = prefix + struct.pack(f"{order}IHHHIHH", 8, 1, 0x0112, 3, 1, 6, 0)
        data = png(40, 30, png_chunk(b"eXIf", exif), png_chunk(b"IDAT", b""))
        assert read_header(data).orientation == 6


def test_an_orientation_behind_the_pixels_of_a_png_does_not_count() -> None:
    exif = png_chunk(b"eXIf", turned(6).removeprefix(b"Exif\0\0"))
    pixels = png_chunk(b"IDAT", b"")
    assert read_size(png(40, 30, exif, pixels)) == ImageSize(30, 40, "png")
    assert read_size(png(40, 30, pixels, exif)) == ImageSize(40, 30, "png")


def test_an_image_that_is_stored_from_top_to_bottom_has_a_height() -> None:
    data = bytearray(encoded(picture(40, 30), "bmp"))
    struct.pack_into("<i", data, 22, -30)
    assert read_size(bytes(data)) == ImageSize(40, 30, "bmp")


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("HEIC", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"),
        ("HEIC", b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic"),
        ("SVG", b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
        ("SVG", b"\xef\xbb\xbf<?xml version='1.0'?><svg/>"),
        ("PDF", b"%PDF-1.7\n"),
        ("TIFF", b"II*\0\x08\0\0\0"),
        ("TIFF", b"MM\0*\0\0\0\x08"),
    ],
)
def test_formats_that_are_not_read_are_named(name: str, data: bytes) -> None:
    refused = refusal(data)
    assert refused.code == "image_format"
    assert refused.reason == (
        f"the image is {name}, which is not read; send it as PNG, JPEG, WebP, GIF, BMP or AVIF"
    )


@pytest.mark.parametrize("data", [b"", b"hello", b"RIFF\0\0\0\0WAVE", b"\0" * 100, b"\x89PNG"])
def test_other_data_is_no_image(data: bytes) -> None:
    assert refusal(data).code == "image_format"


@pytest.mark.parametrize("format", FORMATS)
def test_a_header_that_is_cut_off_is_damaged(format: ImageFormat) -> None:
    data = encoded(picture(40, 30), format)
    codes = {refusal(data[:length]).code for length in (6, 12, 16, 20) if format != "gif"}
    assert codes <= {"image_damaged", "image_format"}
    assert refusal(data[:8] if format == "gif" else data[:18]).code == "image_damaged"


def test_an_image_without_pixels_is_damaged() -> None:
    assert refusal(png(0, 10)).code == "image_damaged"
    assert refusal(png(10, 0)).code == "image_damaged"


@pytest.mark.parametrize(
    ("width", "height", "fault"),
    [
        (20_000, 20_000, "a side may have 16,384 pixels"),
        (MAX_SIDE + 1, 100, "a side may have 16,384 pixels"),
        (8_193, 8_192, "67,108,864 pixels are the maximum"),
        (201, 1, "one side may be 200 times as long as the other"),
        (1, MAX_SIDE, "one side may be 200 times as long as the other"),
        (2**31 - 1, 2**31 - 1, "a side may have 16,384 pixels"),
    ],
)
def test_sizes_beyond_the_limits_are_refused(width: int, height: int, fault: str) -> None:
    refused = refusal(png(width, height))
    assert refused.code == "image_too_large"
    assert refused.reason == (
        f"the image is too large, {width} x {height} pixels: {fault}; send it smaller"
    )


def test_sizes_at_the_limits_pass() -> None:
    for width, height in ((8192, 8192), (MAX_SIDE, 4096), (200, 1), (MAX_SIDE, 82)):
        assert width * height <= MAX_PIXELS
        assert read_size(png(width, height)) == ImageSize(width, height, "png")


# -- damaged files -------------------------------------------------------------------------------


def check(data: bytes) -> None:
    """A size within the limits, or a refusal."""
    try:
        size = read_size(data)
    except ImageRefused as refused:
        assert refused.code in {"image_format", "image_damaged", "image_too_large"}
        return
    assert 1 <= size.width <= MAX_SIDE
    assert 1 <= size.height <= MAX_SIDE


@pytest.mark.parametrize("format", FORMATS)
def test_a_mutated_file_has_a_size_or_is_refused(format: ImageFormat) -> None:
    options = {} if format in ("gif", "bmp") else {"exif": turned(6)}
    data = encoded(picture(40, 30), format, **options)
    for mutant in mutated(data, MUTANTS):
        check(mutant)


STARTS = [
    b"",
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    b"\xff\xd8",
    b"\xff\xd8\xff\xe1\0\x40Exif\0\0II*\0\x08\0\0\0",
    b"GIF89a",
    b"BM",
    b"RIFF\0\0\0\0WEBPVP8X",
    b"RIFF\0\0\0\0WEBPVP8L",
    b"\0\0\0\x10ftypavif\0\0\0\0\0\0\0\x30meta\0\0\0\0",
]


@given(st.sampled_from(STARTS), st.binary(max_size=300))
def test_bytes_behind_any_beginning_have_a_size_or_are_refused(start: bytes, rest: bytes) -> None:
    check(start + rest)


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (png(40, 30)[:33], png_chunk(b"tEXt", b"")),
        (b"\xff\xd8", b"\xff\xe0\0\x02"),
        (b"\xff\xd8", b"\xff"),
        (b"\xff\xd8", b"\xff\xd0"),
        (b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0" + b"\0" * 10, b"ICCP\0\0\0\0"),
        (b"\0\0\0\x10ftypavif\0\0\0\0", b"\0\0\0\x08free"),
    ],
    ids=str,
)
def test_a_file_of_many_small_parts_is_soon_read(begin: bytes, part: bytes) -> None:
    """Each part costs the same, and MAX_PARTS of them are looked at: the test would take minutes if
    the time were quadratic."""
    check(begin + part * (20 * 2**20 // len(part)))


def test_pillow_agrees_about_mutated_files() -> None:
    """Where Pillow opens a mutant, its size is ours; it may refuse what has a size for us."""
    agreed = 0
    for format in FORMATS:
        for mutant in mutated(encoded(picture(40, 30), format), 200, seed=1):
            try:
                header = read_header(mutant)
                with Image.open(io.BytesIO(mutant)) as opened:
                    size = opened.size
            except Exception:  # noqa: BLE001, S112 - Pillow raises many.
                continue
            assert size == (header.width, header.height), (format, mutant)
            agreed += 1
    assert agreed > 200
