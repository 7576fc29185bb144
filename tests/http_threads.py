"""Servers of http.server in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseServer
from typing import TypeVar

POLL_S = 0.01  # How soon `shutdown` is noticed.
S = TypeVar("S", bound=BaseServer)


@contextmanager
def served_in_thread(server: S) -> Iterator[S]:
    """Serve until the context is left, and close the socket."""
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,))
    with server:
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
