"""mlx_lm.server as a program: `python -m benchmarks.mlx_lm_server BLAS FLAGS`; BLAS: see
benchmarks.blas. Its sockets get a longer queue."""

from __future__ import annotations

import sys

from benchmarks import blas
from trouper import connection_queue


def main() -> None:
    connection_queue.lengthen()
    blas.choose(sys.argv.pop(1))
    from mlx_lm.server import main as serve

    serve()


if __name__ == "__main__":
    main()
