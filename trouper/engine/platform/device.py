"""Properties of the device. They are queried as capabilities; no platform or product is named."""

from __future__ import annotations

import platform
from functools import cache

import mlx.core as mx

from trouper import heap
from trouper.engine.platform.system_memory import this_system
from trouper.main_memory import main_memory_bytes
from trouper.protocol.model import MemoryStats

RECOMMENDED, TOTAL = "max_recommended_working_set_size", ("total_memory", "memory_size")
"""Keys of `mx.device_info`: Metal's working set; a CUDA device's memory, by version."""
SPARE_PART = 16
"""Part of the working set that freed buffers may keep, as its denominator."""
WEIGHTS_PART = 0.7
"""Fraction of the device's memory for the weights of several models; the remainder is for KV."""
FREE = "free_memory"
"""Key of what no process uses of a CUDA device's memory."""


def is_cpu() -> bool:
    """Whether MLX's default device is the CPU."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


@cache
def rounds_factors() -> bool:
    """Whether float32 products round their factors to TensorFloat-32 (11 bits of mantissa), as
    NVIDIA's tensor cores do unless MLX_ENABLE_TF32=0. Found by multiplying: there 1 + 2**-13 is 1.
    The size is one at which tensor cores are used."""
    side = mx.full((128, 128), 1 + 2**-13)
    return not is_cpu() and bool(mx.abs((side @ mx.eye(128))[0, 0] - 1).item() < 2**-14)  # type: ignore[operator]


def runs_ahead() -> bool:
    """Whether a step can be launched while the one before it runs. On CPU MLX bounds the tasks in
    flight to a few, so that launching blocks until the device has come almost that far."""
    return not is_cpu()


def prepares_shapes() -> bool:
    """Whether each new shape of a pass costs the device a long preparation. Steps that verify
    drafts have many shapes."""
    return bool(mx.cuda.is_available()) and not is_cpu()


def runs_cuda_kernels() -> bool:
    """Whether the device runs CUDA kernels of ours, by MLX's interface for custom kernels."""
    return prepares_shapes() and hasattr(mx.fast, "cuda_kernel")


def name() -> str:
    """Return the name of the device, for logs and the model's card."""
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or platform.machine())


def architecture() -> str:
    """Return MLX's name of the architecture, such as "sm_90" for an NVIDIA GPU; "" for a CPU."""
    return "" if is_cpu() else str(mx.device_info().get("architecture", ""))


def memory_limit_bytes(sharers: int = 1) -> int:
    """Return the memory limit of this process: the accelerator's limit, or the memory of the
    machine or container, divided by `sharers` processes. Where the device says how much memory is
    free, what other processes use is not counted."""
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
    """Measure memory in bytes: the larger of what MLX knows and of what the system charges to this
    process. `sharers`: number of processes that share the device's limit."""
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
    """Return the working set that the device recommends; 0 where it recommends none, and no memory
    is ever wired."""
    return int(mx.device_info().get(RECOMMENDED, 0))


def bound_spare_buffers(nbytes: int | None) -> None:
    """Bound the freed buffers that MLX keeps. None: a part of the recommended working set, where
    there is one, since MLX's own bound is nearly all memory of the machine; elsewhere as MLX has
    it."""
    if nbytes is None and (recommended := working_set_bytes()):
        nbytes = recommended // SPARE_PART
    if nbytes is not None:
        mx.set_cache_limit(nbytes)
