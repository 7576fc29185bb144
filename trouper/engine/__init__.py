"""The only room that imports MLX: loading, the batch step, sampling, KV. What must precede MLX's import happens here."""

from trouper.engine.platform import cuda_environment, malloc, openblas

malloc.keep_large_buffers()
cuda_environment.allow_any_shapes()
FAST_BLAS = openblas.load_fast()
"""The OpenBLAS that MLX multiplies with; None: its own library."""
