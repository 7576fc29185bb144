"""The engine: loading, the batch step, sampling, KV. The only package that imports MLX, after the
settings here that must precede it."""

from trouper import temporary_directory
from trouper.engine.platform import cuda_environment, malloc, openblas
from trouper.workarounds import mlx_lm_open_files

malloc.keep_large_buffers()
temporary_directory.keep_private()
cuda_environment.prepare()
mlx_lm_open_files.keep_limit()
FAST_BLAS = openblas.load_fast()
"""Path of the OpenBLAS that MLX uses; None: MLX uses its own library."""
