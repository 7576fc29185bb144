"""Environment variables of MLX's CUDA build, which must be set before the import of MLX."""

from __future__ import annotations

import os

THRASHING_CHECK = "MLX_ENABLE_CACHE_THRASHING_CHECK"
"""MLX keeps kernels that were prepared for a shape (attention of cuDNN: 256 of them, least recently used first evicted) and
raises RuntimeError when it has ever prepared twice as many. Prompts come in any lengths: a server would end after its first
few hundred."""


def allow_any_shapes() -> None:
    """Turn the thrashing check off, unless the environment sets it."""
    os.environ.setdefault(THRASHING_CHECK, "0")
