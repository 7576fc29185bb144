"""Settings of the process that MLX and mlx-lm need, and that no import makes."""

from __future__ import annotations

from trouper import heap, temporary_directory, workarounds
from trouper.engine.platform import cuda_environment
from trouper.workarounds import mlx_lm_open_files, mlx_reference_blas


def prepare_process() -> None:
    """Prepare this process for the engine. Must precede the first import of MLX and mlx-lm.

    Sets variables of the environment (TMPDIR, MLX_PTX_CACHE_DIR, those of MLX's CUDA build; a
    variable that is set already keeps its value, if it is safe) and options of glibc's malloc,
    loads a fast BLAS, and keeps the limit on open files. `run_runtime` and `run_models` call it
    before they import MLX; a program that imports MLX earlier calls it itself. A second call
    changes nothing.
    """
    workarounds.warn_of_unknown()
    heap.keep_large_buffers()
    temporary_directory.keep_private()
    cuda_environment.prepare()
    mlx_lm_open_files.keep_limit()
    mlx_reference_blas.load_fast()
