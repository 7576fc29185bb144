"""The BLAS of a server that is not Trouper's, in its own process, before it imports MLX. It matters
on a Linux CPU alone.

`products`: OpenBLAS with Trouper's products of vectors; `openblas`: OpenBLAS as it is; `installed`:
what `pip install mlx[cpu]` brings, which is the reference BLAS.
"""

from __future__ import annotations

import os

from trouper import workarounds  # With the module below, needs the standard library alone.


def choose(name: str) -> bool:
    """Whether OpenBLAS was loaded. It is where `scipy-openblas32` is installed, and MLX is not a
    GPU's."""
    if name == "installed":
        return False
    if name == "openblas":
        os.environ[workarounds.VARIABLE] = "openblas_vector_products"
    from trouper.workarounds import mlx_reference_blas

    return mlx_reference_blas.load_fast() is not None
