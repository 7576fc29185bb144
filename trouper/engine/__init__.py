"""The only room that imports MLX: loading, the batch step, sampling, KV. What must precede MLX's import happens here."""

from trouper.engine import blas, kernels, malloc

malloc.keep_large_buffers()
kernels.allow_any_shapes()
FAST_BLAS = blas.load_fast()
"""The OpenBLAS that MLX multiplies with; None: its own library."""
