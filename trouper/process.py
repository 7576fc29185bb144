from __future__ import annotations

from trouper import workarounds
from trouper.engine.platform import cuda_environment
from trouper.system import heap, temporary_directory
from trouper.workarounds import mlx_lm_open_files, mlx_reference_blas


def prepare_process() -> None:
    """Prepare this process for the engine, before the first import of MLX and mlx-lm.

    Sets variables (TMPDIR, MLX_PTX_CACHE_DIR, MLX's CUDA build) and malloc's options, loads a fast
    BLAS, and keeps the limit on open files. `run_runtime` and `run_models` call `prepare_process`.
    """
    workarounds.warn_of_unknown()
    heap.keep_large_buffers()
    temporary_directory.keep_private()
    cuda_environment.prepare()
    mlx_lm_open_files.keep_limit()
    mlx_reference_blas.load_fast()
