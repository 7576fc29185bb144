"""The settings of the process that MLX needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from trouper import workarounds
from trouper.system import heap, temporary_directory
from trouper.workarounds import mlx_lm_open_files, mlx_reference_blas, openblas_threads

# MLX caches 256 cuDNN kernels by shape and raises RuntimeError after 512 misses, which prompts soon
# cause.
THRASHING_CHECK = "MLX_ENABLE_CACHE_THRASHING_CHECK"

# Limits of a CUDA graph. MLX instantiates each new sequence of operations: short ones repeat
# between layers, and cuts by bytes would shift as buffers grow (benchmarks/RESULTS.md).
SMALL_GRAPHS = {"MLX_MAX_OPS_PER_BUFFER": "20", "MLX_MAX_MB_PER_BUFFER": "100000"}

# Between GPUs, operations are sent one by one. In a CUDA graph MLX captures each sum again, which
# takes 54 us more, twice a layer: a server on two H200s made 36 tokens a second with graphs and 66
# without (benchmarks/RESULTS.md). MLX reads the variable once, so a trial would take a process.
GRAPHS = "MLX_USE_CUDA_GRAPHS"

NCCL_HOST = "NCCL_HOST_IP"
BACKENDS = {
    "MLX_HOSTFILE": "ring",
    "MLX_IBV_DEVICES": "jaccl",
    NCCL_HOST: "nccl",
    "OMPI_COMM_WORLD_SIZE": "mpi",
    "PMI_SIZE": "mpi",
}
"""Backends of MLX's groups, by the variable that a launcher of several ranks sets."""


def backend_of(environment: Mapping[str, str]) -> str | None:
    """None: one process."""
    return next((backend for name, backend in BACKENDS.items() if environment.get(name)), None)


def prepare_cuda() -> None:
    """Set the variables of MLX's CUDA build that the environment lacks."""
    os.environ.setdefault(THRASHING_CHECK, "0")
    if cuda_build():
        for name, value in SMALL_GRAPHS.items():
            os.environ.setdefault(name, value)
        if backend_of(os.environ) == "nccl":
            os.environ.setdefault(GRAPHS, "0")


def cuda_build() -> bool:
    """Whether MLX is the build for CUDA, without an import. Metal reads the same variables."""
    found = find_spec("mlx")
    folders = found.submodule_search_locations if found else None
    return any(any(Path(folder).parent.glob("mlx_cuda*")) for folder in folders or ())


def prepare_process() -> None:
    """Prepare this process for the engine, before the first import of MLX and mlx-lm.

    Sets variables (TMPDIR, MLX_PTX_CACHE_DIR, MLX's CUDA build) and malloc's options, loads a fast
    BLAS, and keeps the limit on open files. `run_runtime` and `run_models` call `prepare_process`.
    """
    workarounds.warn_of_unknown()
    heap.keep_large_buffers()
    temporary_directory.keep_private()
    prepare_cuda()
    mlx_lm_open_files.keep_limit()
    if mlx_reference_blas.load_fast() is not None:
        openblas_threads.cores_left()  # Other programs' work is known when a model is loaded.
