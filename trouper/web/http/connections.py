"""Connections: number, order in which they give way, and those that wait."""

from __future__ import annotations

import resource
import socket
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Protocol, TypeVar

import h11
import trio

from trouper.protocol.problems import SettingsInvalid
from trouper.web.http.plain_http import StrictHttp

AT_ONCE = 32  # Connections accepted per run of the event loop.
LONGEST_PROBE = 2**12
PROBE = b"GET /livez HTTP/1.1\r\n"
ALIVE = b'{"status":"alive"}'


def accept_now(listener: trio.abc.Listener[trio.SocketStream]) -> socket.socket | None:
    """Accept a client that waits already, without a turn for other tasks. None without one, or
    without a descriptor."""
    if not isinstance(listener, trio.SocketListener):
        return None
    # Another object of the same descriptor: a copy would need one more.
    waiting = socket.socket(fileno=listener.socket.fileno())
    try:
        return waiting.accept()[0]
    except OSError:
        return None
    finally:
        waiting.detach()


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


class Held(Protocol):
    @property
    def network(self) -> str:
        """As `network_of` returns it."""

    @property
    def idle_since(self) -> float | None:
        """The last request's end; None during a request."""


Connected = TypeVar("Connected", bound=Held)


def in_order_of_leaving(held: Collection[Connected]) -> list[Connected]:
    """Return idle connections: those of the busiest address first, the longest idle first."""
    of = Counter(one.network for one in held)
    idle = [(-of[one.network], since, one) for one in held if (since := one.idle_since) is not None]
    return [one for *_, one in sorted(idle, key=lambda item: item[:2])]


def network_of(address: str) -> str:
    """Return the part of an address that clients cannot vary: all of IPv4, the network of IPv6."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:  # A socket that has no address.
        return address
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or parsed.exploded[:19])


# Descriptors kept from connections, of a small limit a quarter: for files, a compiler's pipes, the
# process that tries grammars, the SSD tier and links of ranks.
SPARE = 32
RESERVED = 8  # Connections beyond --max-connections, for health and refusals.
FLAG = "--max-connections"


def connection_limit(connections: int) -> tuple[int, str]:
    """Return the number of connections, and a line for the log if below `connections`. Raises the
    soft limit as far as possible. Raises `SettingsInvalid` if none fits."""
    others = other_files()
    needed = connections + others
    soft = _raised_limit(needed)
    if soft is None or soft >= needed:
        return connections, ""
    remedy = f"raise it with ulimit -n {needed}"
    message = f"{FLAG} {connections} needs {needed} descriptors, the limit is {soft}"
    left = soft - others + SPARE - _spare_of(soft)
    if left <= 0:
        raise SettingsInvalid(f"{message}, which leaves no room for any; {remedy}", FLAG)
    return left, f"{message}: {left} connections; {remedy}"


def other_files() -> int:
    return open_files() + SPARE + RESERVED


def is_spare(descriptor: int) -> bool:
    """Whether a new descriptor is among the last ones, kept from connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and descriptor >= soft - _spare_of(soft)


def _spare_of(limit: int) -> int:
    return min(SPARE, limit // 4)


def open_files() -> int:
    try:
        return sum(1 for _ in Path("/dev/fd").iterdir())
    except OSError:  # A container may have no such directory.
        return SPARE


def _raised_limit(needed: int) -> int | None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        with suppress(ValueError, OSError):  # A container may forbid it.
            bound = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (bound, hard))
            soft = bound
    return None if soft == resource.RLIM_INFINITY else soft
