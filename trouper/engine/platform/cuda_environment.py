"""What MLX's CUDA build is told before it is imported."""

from __future__ import annotations

import os

THRASHING_CHECK = "MLX_ENABLE_CACHE_THRASHING_CHECK"
"""MLX keeps kernels that were prepared for a shape (attention of cuDNN: 256 of them, least recently used first to go) and
raises RuntimeError when it has prepared twice as many, ever. Prompts come in any lengths: a server would end after its first
few hundred."""


def allow_any_shapes() -> None:
    """Unless the environment says otherwise."""
    os.environ.setdefault(THRASHING_CHECK, "0")
