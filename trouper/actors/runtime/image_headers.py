"""Sizes of image files from their headers, without decoding."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from struct import unpack_from

import attrs

from trouper.protocol.media import ImageFormat, ImageSize

# The readers are ours: Pillow decodes a whole PNG before it tells the orientation, and stays out of
# the server's process.
MAX_PIXELS = 64 * 2**20
"""Cameras of "64 megapixels" have up to 64.4 million."""
MAX_SIDE = 16_384
MAX_RATIO = 200
"""Largest quotient of the sides. Qwen's rules for sizes refuse more."""
MAX_PARTS = 65_536
"""Chunks, segments or boxes of a file that are looked at: a bound on the time."""
SENDABLE = "send it as PNG, JPEG, WebP, GIF, BMP or AVIF"


class ImageRefused(Exception):
    """`code`: image_format, image_damaged or image_too_large; `reason`: a clause for the client
    that does not name the part."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@attrs.frozen
class ImageHeader:
    """A file as stored. `width` and `height` in pixels, before the orientation; `orientation`: 1 to
    8, as EXIF numbers them."""

    format: ImageFormat
    width: int
    height: int
    orientation: int = 1

    @property
    def size(self) -> ImageSize:
        if self.orientation >= 5:  # A quarter turn.
            return ImageSize(self.height, self.width, self.format)
        return ImageSize(self.width, self.height, self.format)


def read_size(data: bytes) -> ImageSize:
    """Read an image's size as seen. Raises `ImageRefused`, also for a size beyond the limits."""
    return read_header(data).size


def read_header(data: bytes) -> ImageHeader:
    """Raises `ImageRefused`, also for a size beyond the limits."""
    reader = _find_reader(data)
    try:
        header = reader(data)
    except (struct.error, IndexError):
        raise _damaged("its header is cut off") from None
    _check_limits(header.width, header.height)
    return header


def _damaged(reason: str) -> ImageRefused:
    return ImageRefused("image_damaged", f"the image is damaged: {reason}")


def _check_limits(width: int, height: int) -> None:
    if not (width and height):
        raise _damaged("its header says that it has no pixels")
    fault = ""
    if max(width, height) > MAX_SIDE:
        fault = f"a side may have {MAX_SIDE:,} pixels"
    elif width * height > MAX_PIXELS:
        fault = f"{MAX_PIXELS:,} pixels are the maximum"
    elif max(width, height) > MAX_RATIO * min(width, height):
        fault = f"one side may be {MAX_RATIO} times as long as the other"
    if fault:
        reason = f"the image is too large, {width} x {height} pixels: {fault}; send it smaller"
        raise ImageRefused("image_too_large", reason)


# -- formats -------------------------------------------------------------------------------------

Reader = Callable[[bytes], ImageHeader]
AVIF_BRANDS = {b"avif", b"avis"}
HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}
SVG = re.compile(rb"\s*(?:<\?xml|<!--|<!DOCTYPE svg|<svg)")


def _find_reader(data: bytes) -> Reader:
    """Raises `ImageRefused` for a format that is not read."""
    for beginning, reader in READERS:
        if data.startswith(beginning):
            return reader
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _read_webp
    brands = _list_brands(data)
    if brands & AVIF_BRANDS:
        return _read_avif
    name = _name_other_format(data, brands)
    if name:
        raise ImageRefused("image_format", f"the image is {name}, which is not read; {SENDABLE}")
    raise ImageRefused("image_format", f"this is no image in a known format; {SENDABLE}")


def _list_brands(data: bytes) -> set[bytes]:
    """Major and compatible brands of an ISO media file (ISO/IEC 14496-12)."""
    if data[4:8] != b"ftyp":
        return set()
    end = min(int.from_bytes(data[:4], "big"), 256)
    return {data[at : at + 4] for at in (8, *range(16, end, 4))}


def _name_other_format(data: bytes, brands: set[bytes]) -> str:
    if brands & HEIC_BRANDS:
        return "HEIC"
    if data.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
        return "TIFF"
    if data.startswith(b"%PDF-"):
        return "PDF"
    if SVG.match(data[:1024].removeprefix(b"\xef\xbb\xbf")):
        return "SVG"
    return ""


# -- PNG, GIF, BMP -------------------------------------------------------------------------------


def _read_png(data: bytes) -> ImageHeader:
    """Read the chunk IHDR, and eXIf where it precedes the pixels (PNG, third edition)."""
    length, kind, width, height = unpack_from(">I4sII", data, 8)
    if kind != b"IHDR" or length != 13:
        raise _damaged("its first chunk is not IHDR")
    for kind, start, length in islice(_list_png_chunks(data), MAX_PARTS):
        if kind == b"IDAT":
            break
        if kind == b"eXIf":
            orientation = _read_orientation(data[start : start + length])
            return ImageHeader("png", width, height, orientation)
    return ImageHeader("png", width, height)


def _list_png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and length of each chunk's content."""
    at = 8
    while at + 8 <= len(data):
        length, kind = unpack_from(">I4s", data, at)
        yield kind, at + 8, length
        at += length + 12


def _read_gif(data: bytes) -> ImageHeader:
    width, height = unpack_from("<HH", data, 6)
    return ImageHeader("gif", width, height)


def _read_bmp(data: bytes) -> ImageHeader:
    [length] = unpack_from("<I", data, 14)
    if length == 12:
        width, height = unpack_from("<HH", data, 18)
    else:
        width, height = unpack_from("<ii", data, 18)
        # Rows are from top to bottom where the height is negative.
        width, height = max(width, 0), abs(height)
    return ImageHeader("bmp", width, height)


# -- JPEG ----------------------------------------------------------------------------------------

SIZES_OF_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""Markers SOF0 to SOF15, without the tables between them."""
MARKER = re.compile(rb"\xff++(.)", re.DOTALL)


def _read_jpeg(data: bytes) -> ImageHeader:
    """Read the segments before the first frame (ITU-T T.81, annex B)."""
    orientation = 1
    for marker, start, length in islice(_list_jpeg_segments(data), MAX_PARTS):
        if marker in SIZES_OF_FRAMES:
            height, width = unpack_from(">HH", data, start + 1)
            return ImageHeader("jpeg", width, height, orientation)
        if marker == 0xE1 and data.startswith(b"Exif\0\0", start) and orientation == 1:
            orientation = _read_orientation(data[start + 6 : start + length])
    raise _damaged("it has no frame")


def _list_jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and length of each segment's content, up to the compressed data."""
    at = 2
    while (match := MARKER.match(data, at)) is not None:
        marker, at = match[1][0], match.end()
        if marker in (0xD9, 0xDA):  # The end, or compressed data.
            return
        [length] = unpack_from(">H", data, at)
        if length < 2:
            return
        yield marker, at + 2, length - 2
        at += length


# -- WebP ----------------------------------------------------------------------------------------


def _read_webp(data: bytes) -> ImageHeader:
    """Read the first chunk, and EXIF in the extended format (RFC 9649)."""
    kind = data[12:16]
    if kind == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise _damaged("its first frame is no key frame")
        width, height = unpack_from("<HH", data, 26)
        return ImageHeader("webp", width & 0x3FFF, height & 0x3FFF)
    if kind == b"VP8L":
        signature, bits = unpack_from("<BI", data, 20)
        if signature != 0x2F:
            raise _damaged("its first frame has no signature")
        return ImageHeader("webp", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if kind == b"VP8X":
        low_width, high_width, low_height, high_height = unpack_from("<HBHB", data, 24)
        width = 1 + low_width + (high_width << 16)
        height = 1 + low_height + (high_height << 16)
        return ImageHeader("webp", width, height, _find_webp_orientation(data))
    raise _damaged("its first chunk has no image")


def _find_webp_orientation(data: bytes) -> int:
    at = 12
    for _ in range(MAX_PARTS):
        if at + 8 > len(data):
            break
        kind, length = unpack_from("<4sI", data, at)
        if kind == b"EXIF":
            # Some writers keep JPEG's prefix.
            return _read_orientation(data[at + 8 : at + 8 + length].removeprefix(b"Exif\0\0"))
        at += 8 + length + length % 2
    return 1


# -- AVIF ----------------------------------------------------------------------------------------

TURNED = (1, 8, 3, 6)
"""Orientation by irot's quarter turns against the clock."""
TURNED_AND_MIRRORED = ((4, 5, 2, 7), (2, 7, 4, 5))
"""The same with imir behind; by axis, 0: top and bottom change places, 1: left and right."""


def _read_avif(data: bytes) -> ImageHeader:
    """Read the properties of the primary item (ISO/IEC 23008-12). EXIF does not count: irot and
    imir say how the image is shown (AVIF 1.1)."""
    meta = _find_box(data, b"meta", 0, len(data))
    start, end = meta[0] + 4, meta[1]  # Behind version and flags.
    primary = _read_primary_item(data, _find_box(data, b"pitm", start, end)[0])
    start, end = _find_box(data, b"iprp", start, end)
    container = _find_box(data, b"ipco", start, end)
    properties = [*islice(_list_boxes(data, *container), MAX_PARTS)]
    indices = _read_property_indices(data, _find_box(data, b"ipma", start, end)[0], primary)
    of_item = {
        properties[index - 1][0]: properties[index - 1][1]
        for index in indices
        if 0 < index <= len(properties)
    }
    if b"ispe" not in of_item:
        raise _damaged("its header has no size")
    width, height = unpack_from(">II", data, of_item[b"ispe"] + 4)
    turns = data[of_item[b"irot"]] & 3 if b"irot" in of_item else 0
    orientations: Sequence[int] = TURNED
    if b"imir" in of_item:
        orientations = TURNED_AND_MIRRORED[data[of_item[b"imir"]] & 1]
    return ImageHeader("avif", width, height, orientations[turns])


def _list_boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and end of each box's content."""
    while start + 8 <= end:
        length, kind = unpack_from(">I4s", data, start)
        content = start + 8
        if length == 1:
            [length] = unpack_from(">Q", data, content)
            content += 8
        # A length of 0: up to the end.
        box_end = start + length if length else end
        if not content <= box_end <= end:
            return
        yield kind, content, box_end
        start = box_end


def _find_box(data: bytes, kind: bytes, start: int, end: int) -> tuple[int, int]:
    """Start and end of the content of the first box of this kind. Raises `ImageRefused`."""
    for box_kind, content, box_end in islice(_list_boxes(data, start, end), MAX_PARTS):
        if box_kind == kind:
            return content, box_end
    raise _damaged("a part of its header is missing")


def _read_primary_item(data: bytes, at: int) -> int:
    item: int = unpack_from(">I" if data[at] else ">H", data, at + 4)[0]
    return item


def _read_property_indices(data: bytes, at: int, item: int) -> list[int]:
    """Indices of the item's properties, from 1. Raises `struct.error`, `ImageRefused`."""
    version, is_wide = data[at], data[at + 3] & 1
    [entries] = unpack_from(">I", data, at + 4)
    at += 8
    for _ in range(min(entries, MAX_PARTS)):
        entry = struct.Struct(">IB" if version else ">HB")
        entry_item, number = entry.unpack_from(data, at)
        at += entry.size
        if entry_item == item:
            indices = unpack_from(f">{number}{'H' if is_wide else 'B'}", data, at)
            # The highest bit says that the property is essential.
            return [index & (0x7FFF if is_wide else 0x7F) for index in indices]
        at += number * (1 + is_wide)
    raise _damaged("its header has no properties of the image")


# -- EXIF ----------------------------------------------------------------------------------------

ORIENTATION = 0x0112


def _read_orientation(exif: bytes) -> int:
    """The orientation of a TIFF structure (Exif 3.0), 1 where none can be read."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 1
    try:
        [start] = unpack_from(f"{order}I", exif, 4)
        [number] = unpack_from(f"{order}H", exif, start)
        for at in range(start + 2, start + 2 + 12 * number, 12):
            tag, _, _, value = unpack_from(f"{order}HHIH", exif, at)
            if tag == ORIENTATION:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


READERS: tuple[tuple[bytes, Reader], ...] = (
    (b"\x89PNG\r\n\x1a\n", _read_png),
    (b"\xff\xd8", _read_jpeg),
    (b"GIF87a", _read_gif),
    (b"GIF89a", _read_gif),
    (b"BM", _read_bmp),
)
