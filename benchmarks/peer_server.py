"""A peer's server as a program, run by the interpreter of its own environment: `PYTHON -m
benchmarks.peer_server BLAS ENTRY FLAGS`.

BLAS: see benchmarks.blas; ENTRY: the function behind the peer's command, as in `vllm_mlx.cli:main`.
"""

from __future__ import annotations

import sys
from pkgutil import resolve_name

from benchmarks import blas


def main() -> None:
    wanted, entry = sys.argv.pop(1), sys.argv.pop(1)
    if not blas.choose(wanted) and wanted != "installed":
        sys.exit(f"OpenBLAS is not there for MLX: {sys.executable} -m pip install scipy-openblas32")
    resolve_name(entry)()


if __name__ == "__main__":
    main()
