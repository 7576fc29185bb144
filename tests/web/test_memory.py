"""What huge bodies were made of goes back to the system when their requests have ended."""

from __future__ import annotations

import sys

import psutil
import pytest
import trio

from tests.fakes import FakeEngine
from tests.web.serving import Served, ask, eventually, serving
from trouper import heap

MB = 2**20
HUGE = "x" * (12 * MB)


async def several(served: Served, count: int) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(ask, served, {"prompt": HUGE})


async def test_memory_is_given_back_once_for_those_that_end_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[None] = []
    monkeypatch.setattr(heap, "give_back", lambda: given.append(None))
    async with serving(FakeEngine()) as served:
        for _ in range(3):
            await ask(served, {"prompt": "x" * 1000})
        await several(served, 3)
        await eventually(lambda: bool(given))
        assert len(given) <= 3
        before = len(given)
        await several(served, 1)
        await eventually(lambda: len(given) > before)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what a heap keeps is glibc's")
async def test_eight_bodies_of_12_mb_leave_little_behind() -> None:
    """They left 350 MB."""
    own = psutil.Process()
    async with serving(FakeEngine()) as served:
        await several(served, 2)
        before = own.memory_info().rss
        await several(served, 8)
        await eventually(lambda: own.memory_info().rss < before + 64 * MB)
