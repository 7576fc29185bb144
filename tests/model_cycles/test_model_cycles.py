"""The short version of `just model-cycles`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model_cycles.cycles import Seen, run_cycles

CYCLES = 5
MAX_GROWTH_BYTES = 4 * 2**20
"""A model of the loop has 0.5 MB of weights, so of memory that is kept each time much would be seen
only after many cycles."""


@pytest.mark.long
async def test_memory_of_the_device_returns_and_no_request_is_lost(tmp_path: Path) -> None:
    seen = await run_cycles(tmp_path, CYCLES)
    assert (seen.lost, seen.answers) == (0, 2 * CYCLES) and seen.streams
    rows_bytes = max(seen.active_bytes) - min(seen.active_bytes)
    assert rows_bytes < MAX_GROWTH_BYTES


def test_a_slope_is_told_from_noise() -> None:
    grows = Seen(resident_bytes=[100 + 7 * index + index % 2 for index in range(50)]).slope(5)
    assert 6 < grows.low <= 7 <= grows.high < 8
    flat = Seen(resident_bytes=[100 + index % 2 for index in range(50)]).slope(5)
    assert flat.low <= 0 <= flat.high
