"""Other servers for remote images: real sockets on this machine, names that a resolver of the test
knows, and a list of everything that was dialled."""

from __future__ import annotations

import inspect
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import httpcore2
import pytest
import trio

CERTIFICATES = Path(__file__).with_name("certificates")
"""`images.test` and `*.cdn.test`, signed by `ca.pem`."""
PUBLIC = "93.184.216.34"
"""An address of the public network, at which the tests' own server is dialled."""

Answer = Callable[[trio.abc.Stream, bytes], Awaitable[None]]
"""Answers a request, by its head."""


def answer(body: bytes, *fields: str, status: int = 200, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    lines = [f"HTTP/1.1 {status} Status", f"Content-Length: {size}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


def sends(data: bytes) -> Answer:
    async def send(stream: trio.abc.Stream, _: bytes) -> None:
        await stream.send_all(data)

    return send


def redirects(location: str, status: int = 302) -> Answer:
    return sends(answer(b"", f"Location: {location}", status=status))


SYSTEM = socket.getaddrinfo


@attrs.define(eq=False)
class Resolver:
    """In place of `socket.getaddrinfo`. Knows the addresses of names: of several tuples, each is
    the answer of one more look-up. The system reads addresses in digits."""

    names: Mapping[str, Sequence[Sequence[str]]]
    lookups: list[str] = attrs.field(factory=list)

    def getaddrinfo(self, host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else str(host)
        if name not in self.names:
            numeric = kwargs | {"flags": socket.AI_NUMERICHOST}
            return SYSTEM(host, port, *args[:3], **numeric)
        times = self.lookups.count(name)
        self.lookups.append(name)
        answers = self.names[name]
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", (ip, port))
            for ip in answers[min(times, len(answers) - 1)]
        ]


@attrs.define(eq=False)
class Elsewhere:
    """`dialled`: addresses in order; each is the server of this test. `heads`: what it was sent."""

    port: int
    tls_port: int
    resolver: Resolver
    answers: dict[str, Answer]
    """By path."""
    dialled: list[tuple[str, int]] = attrs.field(factory=list)
    heads: list[bytes] = attrs.field(factory=list)

    async def serve(self, stream: trio.abc.Stream) -> None:
        head = b""
        with suppress(trio.BrokenResourceError):
            while b"\r\n\r\n" not in head:
                received = bytes(await stream.receive_some())
                if not received:
                    return
                head += received
            self.heads.append(head)
            path = head.split()[1].decode()
            await self.answers.get(path, sends(answer(b"no", status=404)))(stream, head)
            await stream.aclose()


@asynccontextmanager
async def elsewhere(
    monkeypatch: pytest.MonkeyPatch,
    answers: dict[str, Answer],
    names: Mapping[str, Sequence[Sequence[str]]],
) -> AsyncIterator[Elsewhere]:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATES / "ca.pem"))
    # Tests keep one context for all others (tests/machine.py).
    fresh = inspect.unwrap(httpcore2.default_ssl_context)
    monkeypatch.setattr(httpcore2, "default_ssl_context", fresh)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATES / "server.pem")
    at = Elsewhere(0, 0, Resolver(names), answers)
    monkeypatch.setattr(socket, "getaddrinfo", at.resolver.getaddrinfo)
    dial = trio.open_tcp_stream

    async def dialled(host: str, port: int, **more: Any) -> trio.SocketStream:
        if host == "127.0.0.1" and port not in (at.port, at.tls_port):
            return await dial(host, port, **more)  # The tests' clients.
        at.dialled.append((host, port))
        return await dial("127.0.0.1", port, **more)

    monkeypatch.setattr(trio, "open_tcp_stream", dialled)
    async with trio.open_nursery() as nursery:
        [plain] = await nursery.start(partial(trio.serve_tcp, at.serve, 0, host="127.0.0.1"))
        secure = partial(trio.serve_ssl_over_tcp, at.serve, 0, context, host="127.0.0.1")
        [tls] = await nursery.start(partial(secure, https_compatible=True))
        at.port = plain.socket.getsockname()[1]
        at.tls_port = tls.transport_listener.socket.getsockname()[1]
        yield at
        nursery.cancel_scope.cancel()
