"""Properties of the device, queried as capabilities; no platform or product is named."""

from __future__ import annotations

import platform
from functools import cache

import mlx.core as mx

from trouper.engine.platform.system_memory import this_system
from trouper.protocol.model import MemoryStats
from trouper.system import heap
from trouper.system.main_memory import main_memory_bytes

RECOMMENDED, TOTAL = "max_recommended_working_set_size", ("total_memory", "memory_size")
"""Keys of `mx.device_info`: Metal's working set; CUDA's memory, by version."""
SPARE_PART = 16
"""Denominator of the part of the working set for freed buffers."""
WEIGHTS_PART = 0.7
"""Fraction of the device's memory for all models' weights; KV has the remainder."""
FREE = "free_memory"
"""Key of free CUDA memory."""


def is_cpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.cpu)


@cache
def rounds_factors() -> bool:
    """Whether float32 products round factors to TensorFloat-32, by a trial at a size for tensor
    cores: there 1 + 2**-13 is 1."""
    side = mx.full((128, 128), 1 + 2**-13)
    return not is_cpu() and bool(mx.abs((side @ mx.eye(128))[0, 0] - 1).item() < 2**-14)  # type: ignore[operator]


def runs_ahead() -> bool:
    """Whether a step can be launched during the previous one. On CPU, launching blocks."""
    return not is_cpu()


def prepares_shapes() -> bool:
    """Whether each new shape costs a long preparation. Verifying drafts has many shapes."""
    return bool(mx.cuda.is_available()) and not is_cpu()


def runs_cuda_kernels() -> bool:
    return prepares_shapes() and hasattr(mx.fast, "cuda_kernel")


def name() -> str:
    """The device's name, for logs and the model's card."""
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or platform.machine())


def architecture() -> str:
    """MLX's name of the architecture, such as "sm_90"; "" for a CPU."""
    return "" if is_cpu() else str(mx.device_info().get("architecture", ""))


def memory_limit_bytes(sharers: int = 1) -> int:
    """Memory limit in bytes of the accelerator, machine or container, divided by `sharers`, less
    other processes' memory where known."""
    info = mx.device_info()
    known = (info.get(key) for key in (RECOMMENDED, *TOTAL))
    share = (next((int(size) for size in known if size), 0) or main_memory_bytes()) // sharers
    free = info.get(FREE)
    return (
        share
        if free is None
        else min(share, mx.get_active_memory() + mx.get_cache_memory() + int(free))
    )


def weights_room() -> int:
    """Bytes for the weights of all models together."""
    return int(memory_limit_bytes() * WEIGHTS_PART)


def memory_stats(sharers: int = 1) -> MemoryStats:
    """The larger of MLX's and the system's figures, in bytes. `sharers`: processes on one
    device."""
    system, spare_bytes = this_system(), mx.get_cache_memory()
    return MemoryStats(
        active_bytes=max(mx.get_active_memory(), system.footprint_bytes() - spare_bytes),
        spare_bytes=spare_bytes,
        limit_bytes=memory_limit_bytes(sharers),
        resident_bytes=heap.resident_bytes(),
        pressure=system.pressure(),
        swapped_bytes=system.swapped_bytes(),
    )


def working_set_bytes() -> int:
    """The recommended working set; 0: none."""
    return int(mx.device_info().get(RECOMMENDED, 0))


def bound_spare_buffers(nbytes: int | None) -> None:
    """Bound MLX's freed buffers. None: by the recommended working set, if any."""
    if nbytes is None and (recommended := working_set_bytes()):
        nbytes = recommended // SPARE_PART
    if nbytes is not None:
        mx.set_cache_limit(nbytes)
