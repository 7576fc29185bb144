"""Ports for servers that are told theirs before they start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

LOWEST, HIGHEST = 15_000, 30_000
"""Below the ports that Linux (32768) and macOS (49152) give to clients' sockets and to servers that
ask for any: until the server starts, nobody is given its port."""
TRIES = 1000


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens at, drawn at random: two callers do not get the
    same. Raises OSError."""
    # Each stays bound until the last one is: none is returned twice.
    with ExitStack() as stack:
        return [_bind(stack.enter_context(socket.socket())) for _ in range(count)]


def _bind(probe: socket.socket) -> int:
    draw = random.SystemRandom()  # Others seed the usual one.
    for _ in range(TRIES):
        port = draw.randrange(LOWEST, HIGHEST)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            refusal = error
        else:
            return port
    raise refusal
