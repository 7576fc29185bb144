"""CacheJanitor, SSDWriter and ModelStepper alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.fakes import FakeEngine
from trouper import Settings
from trouper.actors.cache_janitor import SWEEP_EVERY_S, keep_tidy
from trouper.actors.model_stepper import step_model
from trouper.actors.runtime.disk_orders import WriterEdges
from trouper.actors.ssd_writer import write_to_disk
from trouper.protocol.health import NO_ADAPTERS, DirectoryStats, MemoryStatus, SchedulerStats
from trouper.protocol.model import MemoryStats
from trouper.protocol.plan_channel import plan_channel
from trouper.protocol.plans import PLANS_IN_FLIGHT, Plan, Stepped
from trouper.protocol.watch import Watch
from trouper.protocol.work import DiskNews, DiskOrder, Sweep

# -- CacheJanitor ---------------------------------------------------------------------------------


def start_janitor(
    nursery: trio.Nursery, look: Callable[[], MemoryStats], room: int = 1
) -> tuple[Watch[MemoryStatus], trio.MemoryReceiveChannel[DiskOrder]]:
    orders, orders_in = trio.open_memory_channel[DiskOrder](room)
    memory, busy = Watch(MemoryStatus()), Watch(SchedulerStats(active_sequences=1))
    settings, none = Settings(janitor_interval_s=5, ssd_ttl_days=2), Watch(NO_ADAPTERS)
    nursery.start_soon(partial(keep_tidy, orders, look, memory, busy, settings, adapters=none))
    return memory, orders_in


async def test_the_janitor_looks_often_and_sweeps_seldom(autojump_clock: MockClock) -> None:
    looked = []

    def look() -> MemoryStats:
        looked.append(trio.current_time())
        return MemoryStats(active_bytes=95, spare_bytes=0, limit_bytes=100)

    async with trio.open_nursery() as nursery:
        memory, sweeps = start_janitor(nursery, look, room=10)
        await trio.sleep(2 * SWEEP_EVERY_S + 1)
        assert memory.latest.under_pressure
        assert len(looked) == 2 * SWEEP_EVERY_S // 5 + 1
        assert sweeps.statistics().current_buffer_used == 3
        assert sweeps.receive_nowait() == Sweep(2 * 86400)
        nursery.cancel_scope.cancel(reason="the test is over")


async def test_a_full_channel_to_the_writer_sheds(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        _, sweeps = start_janitor(
            nursery, lambda: MemoryStats(active_bytes=0, spare_bytes=0, limit_bytes=1)
        )
        await trio.sleep(10 * SWEEP_EVERY_S)
        assert sweeps.statistics().current_buffer_used == 1
        nursery.cancel_scope.cancel(reason="the test is over")


@pytest.mark.parametrize(
    ("given_back", "asks"),
    [("nothing", 1), ("everything, and it stays away", 1), ("everything, but it comes back", 10)],
)
async def test_f25_memory_is_not_asked_back_for_ever(
    autojump_clock: MockClock, given_back: str, asks: int
) -> None:
    spare = 10

    def look() -> MemoryStats:
        return MemoryStats(active_bytes=95, spare_bytes=spare, limit_bytes=100)

    async with trio.open_nursery() as nursery:
        memory, _ = start_janitor(nursery, look)
        for _ in range(10):
            await trio.sleep(5.5)
            spare = 10 if given_back == "nothing" else 0
            await trio.sleep(5)
            spare = 10 if given_back.endswith("comes back") else spare
            await trio.sleep(4.5)
        assert memory.latest.releases == pytest.approx(asks, abs=1 if asks > 1 else 0)
        nursery.cancel_scope.cancel(reason="the test is over")


# -- SSDWriter -----------------------------------------------------------------------------------


async def carry_out(
    path: Path | None, stats: Watch[DirectoryStats], orders: int = 1
) -> DirectoryStats:
    send, receive = trio.open_memory_channel[DiskOrder](orders)
    for _ in range(orders):
        send.send_nowait(Sweep(86400))
    send.close()
    news, news_in = trio.open_memory_channel[DiskNews](16)
    with news, news_in:
        edges = WriterEdges(receive, news, stats, Watch(SchedulerStats()))
        await write_to_disk(edges, path, "fa4e" * 16, Settings())
    return stats.latest


async def test_the_writer_owns_and_measures_its_directory(tmp_path: Path) -> None:
    stats = await carry_out(tmp_path / "blocks", Watch(DirectoryStats()))
    assert stats.attached
    assert (stats.path, stats.files, stats.reason) == (str(tmp_path / "blocks"), 0, "")
    assert stats.free_disk_bytes > 0


async def test_a_sick_disk_detaches_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "blocks"
    path.write_text("a file where the directory should be")
    watch = Watch(DirectoryStats())
    with caplog.at_level(logging.WARNING):
        sick = await carry_out(path, watch, orders=3)
    assert not sick.attached
    assert sick.reason
    assert len(caplog.records) == 1, "said once, not at each order"
    path.unlink()
    well = await carry_out(path, watch)
    assert (well.attached, well.reason) == (True, "")


async def test_no_ssd_takes_orders_and_touches_nothing(tmp_path: Path) -> None:
    stats = await carry_out(None, Watch(DirectoryStats()), orders=3)
    assert (stats.attached, stats.reason) == (False, "--no-ssd")


# -- ModelStepper --------------------------------------------------------------------------------


@pytest.mark.parametrize("crash", [False, True])
async def test_the_stepper_closes_its_ends_however_it_ends(*, crash: bool) -> None:
    async def before_step(_: Plan) -> None:
        raise RuntimeError("the device died")

    ends = trio.open_memory_channel[Plan](PLANS_IN_FLIGHT)
    plans, plans_in = plan_channel(*ends)
    results, results_in = trio.open_memory_channel[Stepped](PLANS_IN_FLIGHT)
    step = partial(step_model, plans_in, results, FakeEngine(before_step=before_step))
    if crash:
        plans.send_nowait(Plan(0, decode=(0,)))  # type: ignore[arg-type]
        with pytest.raises(RuntimeError):
            await step()
    else:
        plans.send_nowait(Plan(0))
        plans.close()
        await step()
        assert results_in.receive_nowait().step == 0
    with pytest.raises(trio.EndOfChannel):
        results_in.receive_nowait()
    assert ends[1].statistics().open_receive_channels == 0
    await wait_all_tasks_blocked()
