"""Loads a fast BLAS for MLX's CPU build.

The Linux CPU wheel links the reference BLAS, which reaches a few GFLOP/s where OpenBLAS reaches
over a hundred on the same two cores. The linker binds `cblas_sgemm` to the first global definition,
so one that is there before the first `import mlx.core` serves MLX.

scipy-openblas32 is the OpenBLAS that NumPy and SciPy ship: it chooses its kernels for the CPU it
finds. Its symbols have a prefix, which `elf_alias` removes. (Considered: cmeel-openblas has the
plain names, but is compiled for one kind of CPU, another in each release, dies of SIGILL on the
others, and needs a system libgfortran.)
"""

from __future__ import annotations

import ctypes
import sys
from importlib.util import find_spec
from pathlib import Path

from trouper.engine.platform import elf_alias, vector_products

SGEMM = "cblas_sgemm"
FUNCTIONS = (SGEMM, "cblas_dgemm", "cblas_cgemm")
"""All functions that libmlx.so imports from a BLAS. LAPACK is not replaced: a forward pass never
calls it."""


def load_fast() -> Path | None:
    """Let MLX find OpenBLAS, if it is installed. OPENBLAS_NUM_THREADS sets its number of threads.

    Returns the library, or None where there is nothing to do: another build of MLX (the extra `cpu`
    alone installs OpenBLAS), or MLX is already imported and bound to its own. Safe to call again.
    """
    library = _installed()
    if library is None or "mlx.core" in sys.modules:
        return None
    try:
        openblas = ctypes.CDLL(str(library))
        addresses = {name: _address(openblas, f"scipy_{name}") for name in FUNCTIONS}
        addresses[SGEMM] = vector_products.forwarding(
            addresses[SGEMM], _address(openblas, "scipy_cblas_sgemv")
        )
        elf_alias.publish(addresses, like=library)
    except (OSError, AttributeError):
        return None
    return library


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def _installed() -> Path | None:
    spec = find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        return None
    return next((Path(spec.origin).parent / "lib").glob("libscipy_openblas*.so"), None)
