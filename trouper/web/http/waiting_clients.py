"""Accepts waiting clients, and answers probes among them at once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

import h11
import trio

from trouper.web.http.plain_http import StrictHttp

AT_ONCE = 32
"""Connections accepted per run of the event loop."""
LONGEST_PROBE = 2**12
PROBE = b"GET /livez HTTP/1.1\r\n"
ALIVE = b'{"status":"alive"}'


def accept_waiting(listener: trio.abc.Listener[trio.SocketStream]) -> Iterator[socket.socket]:
    """Accept waiting clients in a single run of the event loop. Ends early without descriptors;
    `listener.accept` will raise."""
    if not isinstance(listener, trio.SocketListener):
        return
    # Trio accepts with a checkpoint. The copy shares the flag that makes `accept` not block.
    with socket.socket(fileno=socket.dup(listener.socket.fileno())) as waiting:
        for _ in range(AT_ONCE):
            try:
                accepted, _ = waiting.accept()
            except OSError:
                return
            yield accepted


def answer_probe(client: socket.socket, headers: list[tuple[bytes, bytes]]) -> bool:
    """Answer a completely received `GET /livez` and close the connection; else read nothing.
    `headers` go into each answer."""
    with suppress(OSError):
        head = client.recv(LONGEST_PROBE, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        if head.startswith(PROBE) and (answer := answer_to(head, headers)) is not None:
            client.recv(len(head))  # A socket with unread bytes would be reset.
            with client:
                client.send(answer, socket.MSG_DONTWAIT)
            return True
    return False


def answer_to(head: bytes, headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """Return the answer to one whole request without a body, else None."""
    connection = StrictHttp(h11.SERVER)
    connection.receive_data(head)
    try:
        events = [connection.next_event(), connection.next_event()]
    except h11.RemoteProtocolError:
        return None
    if type(events[1]) is not h11.EndOfMessage or connection.trailing_data[0]:
        return None
    length = (b"content-length", str(len(ALIVE)).encode())
    own = [(b"content-type", b"application/json"), length, (b"connection", b"close")]
    parts = (
        h11.Response(status_code=200, headers=[*own, *headers]),
        h11.Data(data=ALIVE),
        h11.EndOfMessage(),
    )
    return b"".join(connection.send(part) or b"" for part in parts)
