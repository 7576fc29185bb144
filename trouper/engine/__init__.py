"""The only room that imports MLX: loading, the batch step, sampling, KV. What must precede MLX's import happens here."""

from trouper.engine import blas, malloc

malloc.keep_large_buffers()
blas.load_fast()
