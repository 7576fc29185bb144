"""Compressed bodies are read, and never more of them than a plain body may have."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest

from tests.fakes import FakeEngine
from tests.web.serving import Served, exchange, post, serving
from trouper.protocol.problems import RequestFailed
from trouper.web.http.content_encoding import ENCODINGS, MAX_FRAMES, decoded, zstd

BODY = json.dumps({"prompt": "x", "max_tokens": 2}).encode()


def compressed(data: bytes, encoding: str) -> bytes:
    return gzip.compress(data) if encoding == "gzip" else zstd.compress(data)


def freely(size: int) -> None:
    """There is room for any."""


async def sent(served: Served, data: bytes, encoding: str) -> tuple[int, str | None]:
    status, _, body = await exchange(
        served, post("/v1/completions", data, f"Content-Encoding: {encoding}\r\n")
    )
    return status, json.loads(body).get("error", {}).get("code")


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_a_compressed_body_is_read(encoding: str) -> None:
    data = compressed(BODY, encoding)
    async with serving(FakeEngine(), max_body_bytes=2**20) as served:
        assert await sent(served, data, encoding) == (200, None)
        assert await sent(served, data, encoding.upper()) == (200, None)
        halves = compressed(BODY[:10], encoding) + compressed(BODY[10:], encoding)
        assert await sent(served, halves, encoding) == (200, None)
        assert await sent(served, data[:-3], encoding) == (400, "invalid_encoding")
        assert await sent(served, data + b"x", encoding) == (400, "invalid_encoding")
        assert await sent(served, BODY, encoding) == (400, "invalid_encoding")
        assert await sent(served, b"", encoding) == (400, "invalid_encoding")
        assert await sent(served, compressed(b" " * 2**20 + BODY, encoding), encoding) == (
            413,
            "body_too_large",
        )
        fits = compressed(b" " * (2**20 - len(BODY)) + BODY, encoding)
        assert await sent(served, fits, encoding) == (200, None)


async def test_a_body_that_is_not_compressed_or_in_another_way() -> None:
    async with serving(FakeEngine()) as served:
        assert await sent(served, BODY, "identity") == (200, None)
        for encoding in ("br", "deflate", "gzip, gzip"):
            assert await sent(served, zlib.compress(BODY), encoding) == (
                415,
                "unsupported_encoding",
            )
        assert ("zstd" in ENCODINGS) == (zstd is not None)
        if zstd is None:
            assert await sent(served, BODY, "zstd") == (415, "unsupported_encoding")


def test_a_bomb_is_never_unpacked() -> None:
    """A thousand times its size, in one stream and in many."""
    packed = gzip.compress(b"\0" * 2**24)
    for data in (packed, gzip.compress(b"") * 3 + packed):
        with pytest.raises(RequestFailed) as caught:
            decoded(data, "gzip", 2**16, freely)
        assert caught.value.problem.status == 413
    with pytest.raises(RequestFailed) as caught:
        decoded(gzip.compress(b"") * (MAX_FRAMES + 1), "gzip", 2**16, freely)
    assert caught.value.problem.code == "invalid_encoding"
    assert (
        decoded(gzip.compress(b"") * (MAX_FRAMES - 1) + gzip.compress(b"x"), "gzip", 1, freely)
        == b"x"
    )


@pytest.mark.skipif(zstd is None, reason="zstd is not installed")
def test_the_window_of_a_frame_is_bounded() -> None:
    """A head of a few bytes may ask the decoder for gigabytes."""
    frame = bytes.fromhex("28b52ffd00a8") + bytes.fromhex("010000")
    with pytest.raises(RequestFailed) as caught:
        decoded(frame, "zstd", 2**16, freely)
    assert caught.value.problem.code == "invalid_encoding"
