"""mlx_lm.server as a program: `python -m benchmarks.mlx_lm_server BLAS FLAGS`.

BLAS, which matters on a Linux CPU alone: `products`, OpenBLAS with Trouper's products of vectors; `openblas`, OpenBLAS as it is;
`installed`, what `pip install mlx[cpu] mlx-lm` brings, which is the reference BLAS.

Its sockets get a longer queue. Python's `socketserver` asks for 5 connections that wait; when 128 clients connect at the same time,
Linux answers with SYN cookies, drops what it has no place for, and resets those connections seconds later.
"""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from types import SimpleNamespace

PRODUCTS = "trouper.engine.platform.vector_products"
QUEUE = 1024


def main() -> None:
    blas = sys.argv.pop(1)
    ThreadingHTTPServer.request_queue_size = QUEUE
    if blas == "openblas":
        sys.modules[PRODUCTS] = SimpleNamespace(forwarding=lambda *addresses: addresses[0])  # type: ignore[assignment]
    if blas != "installed":
        import trouper.engine  # noqa: F401 - OpenBLAS before MLX
    from mlx_lm.server import main as serve

    serve()


if __name__ == "__main__":
    main()
