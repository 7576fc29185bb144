"""Environment variables of MLX's CUDA build, which must be set before the import of MLX."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

THRASHING_CHECK = "MLX_ENABLE_CACHE_THRASHING_CHECK"
"""MLX keeps kernels that were prepared for a shape (attention of cuDNN: 256 of them, least recently
used first evicted) and raises RuntimeError when it has ever prepared twice as many. Prompts come in
any lengths: a server would end after its first few hundred."""
SMALL_GRAPHS = {"MLX_MAX_OPS_PER_BUFFER": "20", "MLX_MAX_MB_PER_BUFFER": "100000"}
"""Maximum operations and megabytes of a CUDA graph. MLX cuts a step into graphs, keeps each by its
sequence of operations, and instantiates a graph that it does not have: 30 to 70 ms for all graphs
of a step when one row more decodes alone, or a buffer grows. Graphs of 20 operations instead of 100
repeat from layer to layer, wherever the first one begins; the cut by bytes would shift as buffers
grow. Measured on an H200 (4B shape, rows of different lengths, two banks), longest step and median:
8 rows 66 and 16.5 ms with graphs of 100, 31 and 14.0 ms with 20; 31 rows 64 and 17.9, 22 and 15.3;
one row 5.1 and 5.4 ms."""


def prepare() -> None:
    """Set the variables for MLX's CUDA build, except those that the environment sets."""
    os.environ.setdefault(THRASHING_CHECK, "0")
    if cuda_build():
        for name, value in SMALL_GRAPHS.items():
            os.environ.setdefault(name, value)


def cuda_build() -> bool:
    """Whether the installed MLX is the build for CUDA, whose wheels have names of their own. Does
    not import MLX. MLX's build for Metal reads the same variables, and its defaults are for each of
    Apple's chips."""
    found = find_spec("mlx")
    folders = found.submodule_search_locations if found else None
    return any(any(Path(folder).parent.glob("mlx_cuda*")) for folder in folders or ())
