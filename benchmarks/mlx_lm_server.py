"""mlx_lm.server as a program: `python -m benchmarks.mlx_lm_server BLAS FLAGS`. BLAS: see
benchmarks.blas."""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer

from benchmarks import blas


def main() -> None:
    # The default is 5. Linux answers more by SYN cookies and resets some of these connections
    # seconds later.
    ThreadingHTTPServer.request_queue_size = 1024
    blas.choose(sys.argv.pop(1))
    from mlx_lm.server import main as serve

    serve()


if __name__ == "__main__":
    main()
