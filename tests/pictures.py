"""Pictures for tests: drawn by NumPy, written as PNG without Pillow.

A picture is uint8 (height, width, 3). The coloured shapes and digits are those that the model of
`tests/vision_model` was trained on.
"""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.uint8]
Mask = NDArray[np.bool_]

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 210, 30),
    "purple": (140, 40, 170),
    "orange": (245, 135, 20),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "square", "triangle", "cross")
DIGITS = tuple("0123456789")
FONT = {  # 5 columns, 7 rows; each row is five bits.
    "0": (14, 17, 19, 21, 25, 17, 14),
    "1": (4, 12, 4, 4, 4, 4, 14),
    "2": (14, 17, 1, 2, 4, 8, 31),
    "3": (31, 2, 4, 2, 1, 17, 14),
    "4": (2, 6, 10, 18, 31, 2, 2),
    "5": (31, 16, 30, 1, 1, 17, 14),
    "6": (6, 8, 16, 30, 17, 17, 14),
    "7": (31, 1, 2, 4, 8, 8, 8),
    "8": (14, 17, 17, 14, 17, 17, 14),
    "9": (14, 17, 17, 15, 1, 2, 12),
}


def blank(width: int, height: int, color: tuple[int, int, int] = (128, 128, 128)) -> Picture:
    return np.full((height, width, 3), color, np.uint8)


def put(picture: Picture, what: str, color: str, center: tuple[float, float], size: float) -> None:
    """Draw a shape or a digit into the picture. `center`: (x, y) in pixels; `size`: its width."""
    rows, columns = np.mgrid[: picture.shape[0], : picture.shape[1]]
    x = (columns + 0.5 - center[0]) / (size / 2)
    y = (rows + 0.5 - center[1]) / (size / 2)
    picture[_mask(what, x, y)] = COLORS[color]


def _mask(what: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> Mask:
    """Pixels of a shape that fills the square from -1 to 1."""
    inside: Mask = np.maximum(abs(x), abs(y)) <= 1
    if what == "circle":
        return np.asarray(x * x + y * y <= 1)
    if what == "square":
        return np.asarray(np.maximum(abs(x), abs(y)) <= 0.85)
    if what == "triangle":
        return np.asarray(inside & (2 * abs(x) <= y + 1))
    if what == "cross":
        return np.asarray(inside & (np.minimum(abs(x), abs(y)) <= 0.33))
    bits = np.array([[row >> (4 - column) & 1 for column in range(5)] for row in FONT[what]])
    column = np.clip((x + 1) / 2 * 5, 0, 4).astype(int)
    row = np.clip((y + 1) / 2 * 7, 0, 6).astype(int)
    return np.asarray(inside & (bits[row, column] == 1))


def one(what: str, color: str, width: int = 128, height: int = 128) -> Picture:
    """A picture of a single thing in its middle."""
    picture = blank(width, height)
    put(picture, what, color, (width / 2, height / 2), 0.6 * min(width, height))
    return picture


def screenshot(seed: int, width: int = 1280, height: int = 800) -> Picture:
    """Windows, lines of text and noise, different for each seed. It compresses as a screenshot."""
    drawn = np.random.RandomState(seed)
    picture = blank(width, height, (236, 238, 242))
    for _ in range(6):
        left, top = drawn.randint(0, width * 3 // 4), drawn.randint(0, height * 3 // 4)
        right = left + drawn.randint(width // 8, width // 2)
        bottom = top + drawn.randint(height // 8, height // 2)
        picture[top:bottom, left:right] = drawn.randint(0, 256, 3)
        for line in range(top + 8, min(bottom, height) - 8, 16):
            text = drawn.rand(max(0, min(right, width) - left - 16)) < 0.5
            picture[line : line + 8, left + 8 : left + 8 + len(text)][:, text] = 30
    for at, digit in enumerate(f"{seed:04d}"):
        put(picture, digit, "black", (40 + 44 * at, 40), 40)
    return picture


def png(picture: Picture) -> bytes:
    """The picture as a PNG file: 8 bits, no filter, no interlace (RFC 2083)."""
    height, width, _ = picture.shape
    lines = b"".join(b"\0" + line.tobytes() for line in picture)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(lines, 6))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)


def encoded(picture: Picture) -> str:
    """Base64 of the PNG file."""
    return base64.b64encode(png(picture)).decode()


def data_url(picture: Picture) -> str:
    return "data:image/png;base64," + encoded(picture)
