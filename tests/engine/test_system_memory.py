"""Memory as the system tells it, by values that real Macs have answered; nothing of it was run on
one."""

from __future__ import annotations

import struct
from typing import Any

import mlx.core as mx
import pytest

from trouper import Settings
from trouper.engine.platform import device
from trouper.engine.platform.device import (
    PRESSURE,
    SWAP,
    SWAP_USAGE,
    THIS_SYSTEM,
    USAGE,
    WIRED_PART,
    KernelMemory,
    WiredMemory,
)

MIB, GIB = 2**20, 2**30


def rusage(footprint: int) -> bytes:
    """A `rusage_info_v0`: identifier, then times, wake-ups, page-ins, wired, resident and
    footprint, two times."""
    return USAGE.pack(b"u" * 16, 1, 2, 3, 4, 5, 6, 7, footprint, 8, 9)


def mac(
    level: int, swap_mib: tuple[float, float, float] = (0, 0, 0), footprint: int = 0
) -> KernelMemory:
    """`swap_mib`: in total, free and used, as `sysctl vm.swapusage` prints them."""
    answers = {
        PRESSURE: struct.pack("<i", level),
        SWAP: SWAP_USAGE.pack(*(int(size * MIB) for size in swap_mib), 16384, 1),
    }
    return KernelMemory(lambda name: answers.get(name, b""), lambda: rusage(footprint))


@pytest.mark.parametrize(
    ("level", "pressure"),
    [
        # "Green": 2,683,717 pages free, on Yosemite: question 178262 of apple.stackexchange.com.
        (1, "normal"),
        (2, "warning"),  # At 49 % "System-wide memory free percentage": exelban/stats#318.
        (4, "critical"),  # 32,572 pages free, on the machine of the first.
        (0, "unknown"),
        (3, "unknown"),
    ],
)
def test_the_kernels_verdict(level: int, pressure: str) -> None:
    assert mac(level).pressure() == pressure


def test_swap_in_use() -> None:
    """`vm.swapusage: total = 4096.00M  used = 2743.50M  free = 1352.50M  (encrypted)`:
    walles/px#80."""
    assert mac(1, (4096, 1352.5, 2743.5)).swapped_bytes() == int(2743.5 * MIB)
    assert KernelMemory(lambda name: b"", lambda: b"").swapped_bytes() == 0


def test_the_footprint_counts_where_it_is_larger_than_what_mlx_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An M5 Max of 128 GB: MLX had counted 46,506 MB, and the system 110 GB, nearly all of it dirty
    GPU memory: ml-explore/mlx#3896."""
    monkeypatch.setattr(mx, "get_active_memory", lambda: 46_506 * 10**6)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 2 * 10**9)
    for footprint, active in (
        (110 * 10**9, 108 * 10**9),
        (30 * 10**9, 46_506 * 10**6),
        (0, 46_506 * 10**6),
    ):
        monkeypatch.setattr(device, "THIS_SYSTEM", mac(2, footprint=footprint))
        stats = device.memory_stats()
        assert (stats.active_bytes, stats.pressure) == (active, "warning"), (
            "spare buffers are part of the footprint"
        )


def test_a_system_that_says_nothing() -> None:
    silent = KernelMemory(lambda name: b"", lambda: b"")
    assert (silent.footprint_bytes(), silent.pressure(), silent.swapped_bytes()) == (
        0,
        "unknown",
        0,
    )
    assert KernelMemory(lambda name: b"\x01\0\0\0", lambda: b"short").footprint_bytes() == 0


def test_the_system_at_hand_can_be_asked() -> None:
    assert THIS_SYSTEM.pressure() in ("unknown", "normal", "warning", "critical")
    assert THIS_SYSTEM.footprint_bytes() >= 0 and THIS_SYSTEM.swapped_bytes() >= 0


class TestWiredMemory:
    """`recommendedMaxWorkingSetSize` of an M5 Max of 128 GB is 107.52 GiB, and 112 with
    iogpu.wired_limit_mb=114688 (antirez/ds4#893); of an M3 of 16 GB it is 11.84 GB
    (AlexsJones/llmfit#754)."""

    @staticmethod
    def wired(recommended: float) -> tuple[WiredMemory, list[int]]:
        limits: list[int] = []

        def set_limit(nbytes: int) -> int:
            if nbytes > recommended:  # As MLX: mlx/backend/metal/allocator.cpp.
                raise ValueError(
                    "Setting a wired limit larger than the maximum working set size is not allowed."
                )
            limits.append(nbytes)
            return 0

        return WiredMemory(set_limit, lambda: int(recommended)), limits

    def test_the_weights_of_all_models_are_wired_and_given_back(self) -> None:
        wired, limits = self.wired(107.52 * GIB)
        wired.hold("a", 40 * GIB)
        wired.hold("b", 20 * GIB)
        wired.hold("a", 41 * GIB)
        wired.release("a")
        wired.release("a")
        wired.release("nobody")
        wired.release("b")
        assert [limit // GIB for limit in limits] == [40, 60, 61, 20, 0]

    @pytest.mark.parametrize("recommended", [107.52 * GIB, 112 * GIB, 11.84e9])
    def test_the_limit_stays_below_what_the_device_recommends(self, recommended: float) -> None:
        wired, limits = self.wired(recommended)
        wired.hold("a", 10**12)
        assert limits == [int(int(recommended) * WIRED_PART)]
        assert limits[0] < recommended

    def test_ranks_of_one_machine_share_it(self) -> None:
        wired, limits = self.wired(100 * GIB)
        wired.hold("a", 80 * GIB, sharers=4)
        assert limits == [int(100 * GIB * WIRED_PART) // 4]

    def test_nothing_is_wired_where_the_device_recommends_nothing_or_refuses(self) -> None:
        wired, limits = self.wired(0)
        wired.hold("a", 5 * GIB)
        assert limits == [] and wired.limit_bytes == 0
        refusing = WiredMemory(lambda nbytes: exec("raise ValueError('no')"), lambda: GIB)
        refusing.hold("a", 5)
        assert refusing.limit_bytes == 0


def test_a_loaded_model_wires_its_weights_unless_it_was_told_not_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wired, limits = TestWiredMemory.wired(100 * GIB)
    monkeypatch.setattr(device, "WIRED", wired)
    device.bound_memory("a", Settings(no_wired_weights=True), 5 * GIB, 1)
    device.bound_memory("b", Settings(), 7 * GIB, 1)
    assert limits == [7 * GIB]


def test_spare_buffers_are_bounded_where_there_is_a_working_set_or_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[int] = []
    info: dict[str, Any] = {"max_recommended_working_set_size": 16 * GIB}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_cache_limit", limits.append)
    device.bound_spare_buffers(None)
    device.bound_spare_buffers(5)
    info.clear()
    device.bound_spare_buffers(None)
    device.bound_spare_buffers(0)
    assert limits == [GIB, 5, 0]
