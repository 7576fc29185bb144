"""Image files for tests: pictures in every format, damaged ones, and files that claim too much."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from trouper.protocol.media import ImageFormat

FORMATS: tuple[ImageFormat, ...] = ("png", "jpeg", "webp", "gif", "bmp", "avif")


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth picture with some noise; no two corners are alike."""
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float64)
    red, green = 255 * columns / max(width - 1, 1), 255 * rows / max(height - 1, 1)
    noise = np.random.default_rng(seed).integers(0, 16, (height, width, 3))
    pixels = np.stack([red, green, 255 - (red + green) / 2], axis=-1) * 0.9 + noise
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, format: ImageFormat, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format.upper(), **options)
    return file.getvalue()


def turned(orientation: int) -> bytes:
    """EXIF with an orientation, as `save(exif=...)` takes it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def png_chunk(kind: bytes, content: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + checksum


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """A PNG of grey pixels of one bit that claims this size, and has these chunks."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + png_chunk(b"IEND", b"")


def bomb(width: int, height: int) -> bytes:
    """A small PNG whose data unpacks to this size."""
    packer = zlib.compressobj(9)
    row = b"\0" * (1 + (width + 7) // 8)
    packed = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    return png(width, height, png_chunk(b"IDAT", packed))


def mutated(data: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Copies with changed, removed, doubled or cut bytes; most changes hit the header."""
    random = Random(seed)
    for _ in range(count):
        copy = bytearray(data)
        for _ in range(random.choice((1, 1, 2, 5, 20))):
            reach = random.choice((32, 128, len(copy))) if copy else 1
            at = random.randrange(max(1, min(reach, len(copy))))
            match random.randrange(5):
                case 0:
                    copy[at : at + 1] = random.randbytes(1)
                case 1:
                    copy[at : at + 4] = random.choice((b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"))
                case 2:
                    del copy[at : at + random.randrange(1, 64)]
                case 3:
                    copy[at:at] = copy[at : at + random.randrange(1, 64)]
                case _:
                    del copy[random.randrange(len(copy) + 1) :]
        yield bytes(copy)
