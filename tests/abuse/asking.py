"""What a client of the abuses sends, and what it heard. Bodies are made when they are sent: some
have 16 MB."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import attrs
import trio

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
PATIENCE_S = 900.0
CHUNK = 2**16


@attrs.frozen
class Ask:
    """One request. `leaves_after_s`: then the client is gone, without having read anything."""

    body: Callable[[], bytes]
    path: str = CHAT
    headers: tuple[tuple[str, str], ...] = ()
    chunk: int | None = None
    """With chunked transfer coding, in chunks of so many bytes."""
    leaves_after_s: float | None = None
    cut: int | None = None
    """Only so many bytes of the body are ever sent."""
    method: str = "POST"


@attrs.frozen
class Heard:
    """Status 0: the connection ended, or the client left, before there was one."""

    status: int
    body: bytes = b""

    @property
    def problem(self) -> dict[str, Any]:
        """What an error says, in any dialect; {} if it is none."""
        with suppress(ValueError):
            said = json.loads(self.body)
            if isinstance(said, dict) and isinstance(said.get("error"), dict):
                return dict(said["error"])
        return {}


def of(**fields: Any) -> Callable[[], bytes]:
    """A body of these fields."""
    return lambda: json.dumps(fields).encode()


def chat(**fields: Any) -> Callable[[], bytes]:
    """An ordinary chat with these fields."""
    return of(
        **({"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4} | fields)
    )


async def ask(port: int, one: Ask) -> Heard:
    """To the end of the answer."""
    try:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            with trio.move_on_after(
                PATIENCE_S if one.leaves_after_s is None else one.leaves_after_s
            ):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_send, stream, one)
                    heard = await _receive(stream)
                    nursery.cancel_scope.cancel()
                return heard
    except OSError:
        pass
    return Heard(0)


async def _send(stream: trio.SocketStream, one: Ask) -> None:
    body = one.body()
    length = f"Content-Length: {len(body)}" if one.chunk is None else "Transfer-Encoding: chunked"
    lines = [f"{one.method} {one.path} HTTP/1.1", "Host: localhost", "Connection: close"]
    lines += [
        "Content-Type: application/json",
        length,
        *(f"{name}: {value}" for name, value in one.headers),
    ]
    with suppress(trio.BrokenResourceError):  # A refusal may come before all was sent.
        await stream.send_all("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if one.chunk is None:
            await stream.send_all(body[: one.cut])
            return
        for start in range(0, len(body), one.chunk):
            data = body[start : start + one.chunk]
            await stream.send_all(b"%x\r\n%s\r\n" % (len(data), data))
        await stream.send_all(b"0\r\n\r\n")


async def _receive(stream: trio.SocketStream) -> Heard:
    parts: list[bytes] = []
    with suppress(trio.BrokenResourceError):
        while data := await stream.receive_some(CHUNK):
            parts.append(bytes(data))
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return Heard(0)
    return Heard(int(head.split()[1]), joined(body) if b"chunked" in head.lower() else body)


def joined(body: bytes) -> bytes:
    """Without the marks of chunked transfer coding."""
    parts, at = [], 0
    while (end := body.find(b"\r\n", at)) > at:
        size = int(body[at:end], 16)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 4 + size
    return b"".join(parts)
