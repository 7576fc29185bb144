"""The engine: loading, batch step, sampling, KV. The only package that imports MLX, after the
settings here."""

from trouper import temporary_directory
from trouper.engine.platform import cuda_environment, malloc, open_files, openblas

malloc.keep_large_buffers()
temporary_directory.keep_private()
cuda_environment.prepare()
open_files.keep_limit()
FAST_BLAS = openblas.load_fast()
"""Path of MLX's OpenBLAS; None: MLX's own library."""
