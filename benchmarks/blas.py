"""The BLAS of a server that is not Trouper's, in its own process, before it imports MLX. It matters
on a Linux CPU alone.

`products`: OpenBLAS with Trouper's products of vectors; `openblas`: OpenBLAS as it is; `installed`:
what `pip install mlx[cpu]` brings, which is the reference BLAS.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

PRODUCTS = "trouper.engine.platform.vector_products"


def choose(name: str) -> bool:
    """Whether OpenBLAS was loaded. It is where `scipy-openblas32` is installed, and MLX is not a
    GPU's."""
    if name == "installed":
        return False
    if name == "openblas":
        sys.modules[PRODUCTS] = SimpleNamespace(forwarding=lambda *addresses: addresses[0])  # type: ignore[assignment]
    # OpenBLAS before MLX; needs nothing but the standard library
    from trouper.engine import FAST_BLAS

    return FAST_BLAS is not None
