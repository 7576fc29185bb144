"""Properties of the device, queried as capabilities; no platform or product is named."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct
from collections.abc import Callable
from functools import cache
from typing import Final

import attrs
import mlx.core as mx

from trouper.protocol.health import MemoryPressure
from trouper.protocol.model import MemoryStats
from trouper.protocol.settings import Settings
from trouper.system import heap
from trouper.system.main_memory import main_memory_bytes

PRESSURE, SWAP = "kern.memorystatus_vm_pressure_level", "vm.swapusage"

# Levels of `PRESSURE` (xnu, osfmk/vm/vm_pageout.h).
LEVELS: Final[dict[int, MemoryPressure]] = {1: "normal", 2: "warning", 4: "critical"}

# `struct xsw_usage` (xnu, bsd/sys/sysctl.h): total, free and used bytes, page size, encryption.
SWAP_USAGE: Final = struct.Struct("=QQQII")
USAGE: Final = struct.Struct("=16s10Q")  # `struct rusage_info_v0` (xnu, bsd/sys/resource.h).

# Index of `ri_phys_footprint`: Activity Monitor's memory, with GPU buffers and compressed pages.
FOOTPRINT: Final = 8
MAX_BYTES: Final = 256

Sysctl = Callable[[str], bytes]
"""A name's value; empty: none."""


@attrs.frozen
class KernelMemory:
    """Figures of macOS's kernel; elsewhere 0, or "unknown". `usage`: `rusage_info_v0` of this
    process; empty if unreadable."""

    sysctl: Sysctl
    usage: Callable[[], bytes]

    def footprint_bytes(self) -> int:
        """Bytes that the system charges to this process."""
        data = self.usage()
        return int(USAGE.unpack_from(data)[FOOTPRINT]) if len(data) >= USAGE.size else 0

    def pressure(self) -> MemoryPressure:
        data = self.sysctl(PRESSURE)
        return LEVELS.get(int.from_bytes(data[:4], "little"), "unknown")

    def swapped_bytes(self) -> int:
        data = self.sysctl(SWAP)
        return int(SWAP_USAGE.unpack_from(data)[2]) if len(data) >= SWAP_USAGE.size else 0


def _sysctl(name: str) -> bytes:
    call = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if call is None:
        return b""
    value, size = ctypes.create_string_buffer(MAX_BYTES), ctypes.c_size_t(MAX_BYTES)
    failed = call(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0))
    return b"" if failed else value.raw[: size.value]


def _usage() -> bytes:
    call = getattr(ctypes.CDLL(None), "proc_pid_rusage", None)
    value = ctypes.create_string_buffer(MAX_BYTES)
    return b"" if call is None or call(os.getpid(), 0, value) else value.raw[: USAGE.size]


THIS_SYSTEM = KernelMemory(_sysctl, _usage)


# Keys of `mx.device_info`: Metal's working set; CUDA's memory, by version.
RECOMMENDED, TOTAL = "max_recommended_working_set_size", ("total_memory", "memory_size")
SPARE_PART = 16  # Denominator of the part of the working set for freed buffers.
WEIGHTS_PART = 0.7
"""Fraction of the device's memory for all models' weights; KV has the remainder."""
FREE = "free_memory"


def is_cpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.cpu)


@cache
def rounds_factors() -> bool:
    """Whether float32 products round factors to TensorFloat-32, by a trial at a size for tensor
    cores: there 1 + 2**-13 is 1."""
    side = mx.full((128, 128), 1 + 2**-13)
    difference = mx.abs((side @ mx.eye(128))[0, 0] - 1)
    return not is_cpu() and bool(difference.item() < 2**-14)  # type: ignore[operator]


def runs_ahead() -> bool:
    """Whether a step can be launched during the previous one. On CPU, launching blocks."""
    return not is_cpu()


def prepares_shapes() -> bool:
    """Whether each new shape costs a long preparation. Verifying drafts has many shapes."""
    return bool(mx.cuda.is_available()) and not is_cpu()


def runs_cuda_kernels() -> bool:
    return prepares_shapes() and hasattr(mx.fast, "cuda_kernel")


def name() -> str:
    """For logs and the model's card."""
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
    """For all models together, in bytes."""
    return int(memory_limit_bytes() * WEIGHTS_PART)


def memory_stats(sharers: int = 1) -> MemoryStats:
    """The larger of MLX's and the system's figures, in bytes. `sharers`: processes on one
    device."""
    spare_bytes = mx.get_cache_memory()
    return MemoryStats(
        active_bytes=max(mx.get_active_memory(), THIS_SYSTEM.footprint_bytes() - spare_bytes),
        spare_bytes=spare_bytes,
        limit_bytes=memory_limit_bytes(sharers),
        resident_bytes=heap.resident_bytes(),
        pressure=THIS_SYSTEM.pressure(),
        swapped_bytes=THIS_SYSTEM.swapped_bytes(),
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


log = logging.getLogger("trouper.engine")

# Share of the recommended working set; rows, blocks and activations need the rest.
WIRED_PART: Final = 0.9


@attrs.define(eq=False)
class WiredMemory:
    """The wired limit of this process. `recommended`: bytes; 0: nothing is ever wired."""

    set_limit: Callable[[int], object]
    recommended: Callable[[], int]
    _held: dict[int, int] = attrs.field(factory=dict)
    """Bytes of weights by holder."""
    _ceiling: int = 0
    limit_bytes: int = 0

    def hold(self, holder: object, nbytes: int, sharers: int = 1) -> None:
        self._ceiling = int(self.recommended() * WIRED_PART) // sharers
        self._held[id(holder)] = nbytes
        self._apply()

    def release(self, holder: object) -> None:
        if self._held.pop(id(holder), None) is not None:
            self._apply()

    def _apply(self) -> None:
        limit = min(sum(self._held.values()), self._ceiling)
        if limit == self.limit_bytes:
            return
        try:
            self.set_limit(limit)
        except (
            ValueError,
            RuntimeError,
        ) as error:
            # A system that does not wire, or a limit that was lowered meanwhile.
            log.warning("weights are not wired: %s", error)
            return
        self.limit_bytes = limit


WIRED = WiredMemory(mx.set_wired_limit, working_set_bytes)


def bound_memory(holder: object, settings: Settings, weights_bytes: int, sharers: int) -> None:
    """Wire a loaded model's weights, and bound the allocator's spare buffers."""
    bound_spare_buffers(settings.buffer_cache)
    if not settings.no_wired_weights:
        WIRED.hold(holder, weights_bytes, sharers)
