"""Script that decodes images in a process of its own (`decoding_process.py`), since a file may
crash a decoder, or take memory and time. Imports nothing of the package."""

from __future__ import annotations

import io
import math
import os
import resource
import struct
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from PIL.Image import Image

# Frames on stdin: ORDER, then the file. Frames on stdout: ANSWER, then pixels; first an ANSWER that
# says whether Pillow is there.
ORDER = struct.Struct("<3B9I")
"""Index of the format, orientation, filter; width and height as stored; height and width of the
answer, of the image in it, of the overview (0: none); bytes of the file."""
ANSWER = struct.Struct("<BI")
"""One of the kinds below, and bytes of pixels."""
DECODED, DAMAGED, NO_MEMORY, NO_PILLOW, NO_FORMAT = range(5)
MEMORY_BYTES = 2 * 2**30
"""An image of 64 megapixels takes 1.2 GB at most, as WebP."""
CPU_S = 10
"""For one image. A WebP of 64 megapixels takes half of it."""
NICER = 5
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF")
"""Pillow's names. An order has an index."""
OPTIONAL = ("WEBP", "AVIF")
"""Formats that some builds of Pillow lack."""


def serve(inbox: BinaryIO, outbox: BinaryIO) -> None:
    """Answer each order, until the pipe is closed."""
    try:
        from PIL import features
    except ImportError:
        _send(outbox, NO_PILLOW)
        return
    missing = {name for name in OPTIONAL if not features.check(name.lower())}
    _send(outbox, DECODED)
    while len(head := inbox.read(ORDER.size)) == ORDER.size:
        order = ORDER.unpack(head)
        if FORMATS[order[0]] in missing:
            inbox.read(order[-1])
            _send(outbox, NO_FORMAT)
        else:
            # Nothing of an image stays in a variable while the next one is awaited.
            _send(outbox, *_answer(order, inbox.read(order[-1])))


def _answer(order: tuple[int, ...], data: bytes) -> tuple[int, bytes]:
    index, orientation, resample, width, height, *sizes, _ = order
    _limit_cpu()
    try:
        image = _turn(_decode(data, FORMATS[index], (width, height)), orientation)
        return DECODED, _resize(image, resample, sizes)
    except MemoryError:
        return NO_MEMORY, b""
    except Exception:  # noqa: BLE001 - Pillow raises any error for a damaged file.
        return DAMAGED, b""


def _send(outbox: BinaryIO, kind: int, pixels: bytes = b"") -> None:
    outbox.write(ANSWER.pack(kind, len(pixels)))
    outbox.write(pixels)
    outbox.flush()


def _decode(data: bytes, format: str, size: tuple[int, int]) -> Image:
    """The first frame as RGB. Raises `MemoryError` and, for a damaged file, anything else."""
    from PIL import Image

    with _allow_one_processor():
        image: Image.Image = Image.open(io.BytesIO(data), formats=[format])
    if image.size != size:  # Limits were checked for the header's size.
        raise ValueError
    image.load()
    if image.mode.startswith("I"):
        # 16 bits of grey. `convert` would cut them at 255; a transparent grey has 16 bits, too.
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        image.info.pop("transparency", None)
    if not image.has_transparency_data:
        # `convert` copies an image that has the mode.
        return image if image.mode == "RGB" else image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white


@contextmanager
def _allow_one_processor() -> Iterator[None]:
    """Let Pillow open AVIF for one thread: each would count as memory."""
    # When a file is opened, Pillow takes a thread for each processor that the process may use.
    if sys.platform != "linux":  # macOS does not enforce the limit on memory.
        yield
        return
    allowed = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, allowed)


def _turn(image: Image, orientation: int) -> Image:
    from PIL.Image import Transpose

    methods = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(methods[orientation]) if orientation in methods else image


def _resize(image: Image, resample: int, sizes: list[int]) -> bytes:
    """Resize as the processors of transformers do. The overview's pixels come last."""
    from PIL import Image
    from PIL.Image import Resampling

    height, width, scaled_height, scaled_width, overview_height, overview_width = sizes
    method = Resampling(resample)
    pixels = image.resize((scaled_width, scaled_height), method)
    if (scaled_height, scaled_width) != (height, width):
        black = Image.new("RGB", (width, height))
        black.paste(pixels)
        pixels = black
    if not overview_height:
        return pixels.tobytes()
    return pixels.tobytes() + image.resize((overview_width, overview_height), method).tobytes()


def _limit_cpu() -> None:
    """The limit counts from the process's start, so each image moves the limit."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = math.ceil(used.ru_utime + used.ru_stime) + CPU_S
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def main() -> None:
    warnings.simplefilter("ignore")
    with suppress(OSError, ValueError):
        os.nice(NICER)
    # Linux ends this process, not the server, if an image takes all memory.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    for limit, maximum in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        with suppress(OSError, ValueError):
            resource.setrlimit(limit, (maximum, maximum))
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
