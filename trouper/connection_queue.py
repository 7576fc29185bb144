"""How many connections may wait at the HTTP server of Python's library, on which mlx_lm.server
runs.

Python's `socketserver` asks for 5. When 128 clients connect at the same time, Linux answers with
SYN cookies, drops what it has no place for, and resets those connections seconds later. So where
mlx_lm.server is measured, its queue is lengthened before it starts.
"""

from __future__ import annotations

from http.server import ThreadingHTTPServer

LENGTH = 1024


def lengthen() -> None:
    """Servers that start in this process from now on get the longer queue."""
    ThreadingHTTPServer.request_queue_size = LENGTH
