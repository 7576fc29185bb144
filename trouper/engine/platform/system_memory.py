"""The process's footprint, memory pressure, and swap, from kernels that report them (XNU)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from functools import cache
from typing import Final, Protocol

import attrs

from trouper.protocol.health import MemoryPressure

PRESSURE, SWAP = "kern.memorystatus_vm_pressure_level", "vm.swapusage"
LEVELS: Final[dict[int, MemoryPressure]] = {1: "normal", 2: "warning", 4: "critical"}
"""Of `PRESSURE` (xnu, osfmk/vm/vm_pageout.h)."""
SWAP_USAGE: Final = struct.Struct("=QQQII")
"""`struct xsw_usage` (xnu, bsd/sys/sysctl.h): total, free and used bytes, page size, encryption."""
USAGE: Final = struct.Struct("=16s10Q")
"""`struct rusage_info_v0` (xnu, bsd/sys/resource.h)."""
FOOTPRINT: Final = 8
"""Index of `ri_phys_footprint`: Activity Monitor's memory, with GPU buffers and compressed pages.
"""
MAX_BYTES: Final = 256

Sysctl = Callable[[str], bytes]
"""A name's value; empty: none."""


class SystemMemory(Protocol):
    """Capabilities; unknown: 0, or "unknown"."""

    def footprint_bytes(self) -> int:
        """Bytes that the system charges to this process."""

    def pressure(self) -> MemoryPressure:
        """Of the whole machine."""

    def swapped_bytes(self) -> int:
        """Bytes of the machine in swap files."""


class SilentSystem:
    """A system without these figures."""

    def footprint_bytes(self) -> int:
        return 0

    def pressure(self) -> MemoryPressure:
        return "unknown"

    def swapped_bytes(self) -> int:
        return 0


@attrs.frozen
class KernelMemory:
    """`usage`: `rusage_info_v0` of this process; empty if unreadable."""

    sysctl: Sysctl
    usage: Callable[[], bytes]

    def footprint_bytes(self) -> int:
        data = self.usage()
        return int(USAGE.unpack_from(data)[FOOTPRINT]) if len(data) >= USAGE.size else 0

    def pressure(self) -> MemoryPressure:
        data = self.sysctl(PRESSURE)
        return LEVELS.get(int.from_bytes(data[:4], "little"), "unknown")

    def swapped_bytes(self) -> int:
        data = self.sysctl(SWAP)
        return int(SWAP_USAGE.unpack_from(data)[2]) if len(data) >= SWAP_USAGE.size else 0


def system_memory(sysctl: Sysctl, usage: Callable[[], bytes]) -> SystemMemory:
    return KernelMemory(sysctl, usage) if sysctl(PRESSURE) else SilentSystem()


@cache
def this_system() -> SystemMemory:
    return system_memory(_sysctl, _usage)


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
