"""gzip and zstd bodies, under the bounds of plain ones."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from trouper.protocol.problems import Problem, RequestFailed, bad_request
from trouper.web.http.body_parsing import too_large


def _zstd() -> Any:
    """Return the zstd module; None: no wheel for this platform."""
    with suppress(ImportError):
        return import_module(
            "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
        )
    return None


zstd = _zstd()

MAX_FRAMES = 16  # Compressed streams per body; each copies the rest.
FIRST_PIECE, PIECE = 2**16, 2**20  # Bytes decompressed at a time: a bomb ends where memory does.

# Largest zstd window in bits (32 MiB): a frame's head makes the decoder allocate the window.
MAX_WINDOW_LOG = 25
FAULTS: tuple[type[Exception], ...] = (
    (zlib.error, EOFError) if zstd is None else (zlib.error, EOFError, zstd.ZstdError)
)
GZIP = ("gzip", "x-gzip")
ENCODINGS = ("gzip", *(("zstd",) if zstd is not None else ()))


def is_encoded(encoding: str) -> bool:
    return encoding.strip().lower() not in ("", "identity")


def decoded(data: bytes, encoding: str, limit: int, take: Callable[[int], None]) -> bytes:
    """Decompress at most `limit` bytes. `take(bytes)` precedes each output and may raise. Raises
    `RequestFailed` (400, 413, 415)."""
    name = encoding.strip().lower()
    if name in GZIP:
        return _joined(data, limit, lambda: zlib.decompressobj(wbits=31), take)
    if name in ENCODINGS:
        options = {zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG}
        return _joined(data, limit, lambda: zstd.ZstdDecompressor(options=options), take)
    known = " and ".join(ENCODINGS)
    message = f"Content-Encoding {encoding[:32]!r} is not read here, only {known}"
    raise RequestFailed(Problem(415, message, code="unsupported_encoding"))


def _joined(data: bytes, limit: int, decoder: Any, take: Callable[[int], None]) -> bytes:
    parts: list[bytes] = []
    size = 0
    for _ in range(MAX_FRAMES):
        stream = decoder()
        piece = FIRST_PIECE
        while not stream.eof:
            take(piece)
            try:
                parts.append(stream.decompress(data, piece))
            except FAULTS as error:
                raise _broken(str(error)) from None
            data = getattr(stream, "unconsumed_tail", b"")  # zlib's; zstd keeps it.
            size += len(parts[-1])
            if size > limit:
                raise RequestFailed(too_large(limit))
            if not (parts[-1] or stream.eof):
                raise _broken("it ends in the middle")
            piece = PIECE
        data = stream.unused_data
        if not data:
            return b"".join(parts)
    raise _broken(f"it has more than {MAX_FRAMES} compressed streams")


def _broken(reason: str) -> RequestFailed:
    return bad_request(f"the body cannot be decompressed: {reason}", None, "invalid_encoding")
