"""mlx_lm.server as a program: `python -m benchmarks.mlx_lm_server BLAS FLAGS`; BLAS: see benchmarks.blas.

Its sockets get a longer queue. Python's `socketserver` asks for 5 connections that wait; when 128 clients connect at the same time,
Linux answers with SYN cookies, drops what it has no place for, and resets those connections seconds later.
"""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer

from benchmarks import blas

QUEUE = 1024


def main() -> None:
    ThreadingHTTPServer.request_queue_size = QUEUE
    blas.choose(sys.argv.pop(1))
    from mlx_lm.server import main as serve

    serve()


if __name__ == "__main__":
    main()
