"""A fast BLAS under MLX's CPU build.

The Linux CPU wheel links the reference BLAS: 2.5 GFLOP/s where OpenBLAS does 208 on the same two
cores. Symbols that a process has already loaded globally win over a later library's, so an OpenBLAS
loaded before the first `import mlx.core` serves MLX. PyPI's cmeel-openblas is the one whose symbols
carry no prefix (SciPy's do).
"""

from __future__ import annotations

import ctypes
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

NAMES = ("libopenblas.so", "libopenblas.so.0")


def load_fast() -> Path | None:
    """Load the OpenBLAS that is installed beside us, if there is one. Threads: OPENBLAS_NUM_THREADS, as ever.

    Returns the library, or None where there is nothing to do: another build of MLX (the extra `cpu`
    alone installs cmeel-openblas), or MLX is already imported and bound to its own.
    """
    library = _installed()
    if library is None or "mlx.core" in sys.modules:
        return None
    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None
    return library


def _installed() -> Path | None:
    try:
        listed = files("cmeel-openblas") or []
    except PackageNotFoundError:
        return None
    found = (Path(str(path.locate())) for path in listed if path.name in NAMES)
    return next((path.resolve() for path in found if path.exists()), None)
