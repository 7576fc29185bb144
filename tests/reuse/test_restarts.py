"""What is known when a server, or only its engine, begins again."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import attrs
import pytest
import trio

from tests.reuse.serving import BLOCK, Tiny, assert_as_cold, serving, text, until
from tests.storage.making import NAMESPACE, ROOT, all_runs, chain, same, write_run
from trouper import RequestFailed, Settings
from trouper.actors.runtime.disk_orders import WriterEdges
from trouper.actors.scheduling import disk_tier
from trouper.actors.ssd_writer import write_to_disk
from trouper.engine.step import StepEngine
from trouper.protocol.blocks import BlockRef
from trouper.protocol.health import DirectoryStats, SchedulerStats
from trouper.protocol.plans import Load, Plan
from trouper.protocol.watch import Watch
from trouper.protocol.work import (
    Announce,
    Catalogue,
    DiskNews,
    DiskOrder,
    Inspect,
    Loaded,
    Read,
    RemovedFromDisk,
    Sweep,
)
from trouper.storage.cache_directory import prepare
from trouper.storage.runs import RunStore

LONG = text(100, 1)


class Broken(Exception):
    """What the engine raises."""


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2", "jamba"])
@pytest.mark.long(but=("llama", "gemma3_text"))
async def test_after_a_crash_of_the_engine_the_index_is_told_again(
    name: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that was in memory is trusted; what was written by then is read again."""
    crashes: list[int] = []
    catalogues: list[Catalogue] = []
    hear_news = disk_tier.DiskTier.hear

    def hear(tier: disk_tier.DiskTier, news: DiskNews) -> list[Load]:
        loads = hear_news(tier, news)
        catalogues.extend([news] if isinstance(news, Catalogue) and news.complete else [])
        return loads

    monkeypatch.setattr(disk_tier.DiskTier, "hear", hear)

    def crash(plan: Plan, engine: StepEngine) -> None:
        # The trial crashes in its prefill, which is longer than the proof's: if its first token was
        # answered before the first crash, a trial that reaches decoding is past the fault.
        in_trial = len(crashes) == 1 and any(chunk.tokens > 1 for chunk in plan.prefill)
        if in_trial or (crashes and plan.decode):
            raise Broken(f"after {crashes.pop()}")

    async with serving(tiny, crash, ssd_cache_dir=tmp_path / "blocks") as served:
        heard = [await served.one(LONG)]
        # The prompt's end is one, too.
        pieces = -(-heard[0].computed // BLOCK) + tiny.layout.needs_snapshots
        await until(lambda: served.directory.blocks >= pieces)
        crashes += [2, 1]  # The second is in the request's trial.
        with pytest.raises(RequestFailed, match="makes the engine crash"):
            await served.one(text(40, 2))
        await until(
            lambda: (
                served.runtime.health().actors[1].restarts == 2 and served.runtime.health().ready
            )
        )
        await until(lambda: served.stats.cache.blocks == 0)
        await until(lambda: len(catalogues) == 3)  # At the start, and after each crash.
        prompt = heard[0].text + text(5, 3)
        heard.append(await served.one(prompt))
        assert heard[-1].cached == heard[0].computed
        assert served.stats.cache.hits_disk == -(-heard[-1].cached // BLOCK)
        heard.append(await served.one(prompt))
        assert heard[-1].cached == len(prompt) - 1
    await assert_as_cold(tiny, heard)


@pytest.mark.parametrize("name", ["llama"])
async def test_no_blocks_are_reported_while_the_engine_is_tried_after_a_crash(
    name: str, tiny: Tiny
) -> None:
    """They were in the memory of the engine that crashed."""
    crashes, release = ["once"], Event()

    def crash(plan: Plan, engine: StepEngine) -> None:
        if crashes and plan.decode:
            raise Broken(crashes.pop())
        if not crashes:
            assert release.wait(60)

    async with serving(tiny, crash) as served, trio.open_nursery() as nursery:
        nursery.start_soon(served.one, LONG)
        await until(lambda: served.stats.recovery.crashes == 1)
        try:
            await until(lambda: served.stats.cache.blocks == 0)
        finally:
            release.set()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2", "jamba"])
@pytest.mark.long(but=("llama", "jamba"))
async def test_f8_a_text_in_many_files_is_read_part_by_part(
    name: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans carry the blocks of the files that were read so far, and what is answered then is as if
    it had computed all."""
    block_bytes = BLOCK * tiny.layout.token_bytes + tiny.layout.snapshot_bytes
    monkeypatch.setattr(disk_tier, "RUN_BYTES", 2 * block_bytes)
    loaded: list[int] = []

    def count_loads(plan: Plan, engine: StepEngine) -> None:
        loaded.extend([len(plan.load)] if plan.load else [])

    async with serving(tiny, ssd_cache_dir=tmp_path / "blocks") as served:
        heard = [await served.one(text(200, 4))]
        await until(lambda: served.directory.blocks >= -(-heard[0].computed // BLOCK))
        assert served.directory.files > 4
    async with serving(tiny, count_loads, ssd_cache_dir=tmp_path / "blocks") as served:
        heard.append(await served.one(heard[0].text + text(5, 5)))
        assert heard[-1].cached == heard[0].computed
        assert sum(loaded) >= served.stats.cache.hits_disk
    await assert_as_cold(tiny, heard)


async def news_of(path: Path, *orders: DiskOrder) -> list[DiskNews]:
    """All that the writer says to these."""
    ordered, orders_in = trio.open_memory_channel[DiskOrder](10)
    told, news = trio.open_memory_channel[DiskNews](10)
    edges = WriterEdges(orders_in, told, Watch(DirectoryStats()), Watch(SchedulerStats()))
    for order in orders:
        ordered.send_nowait(order)
    ordered.close()
    await write_to_disk(edges, path, NAMESPACE, Settings())
    told.close()
    return [each async for each in news]


@pytest.mark.parametrize(
    "before", [(), (Sweep(1e6),), (Sweep(1e6), Inspect()), (Inspect(), Sweep(1e6))]
)
async def test_the_catalogue_is_whole_when_all_was_told(
    tmp_path: Path, before: tuple[DiskOrder, ...]
) -> None:
    """The janitor's orders come first at the start, and a sweep that finds nothing new is no
    catalogue."""
    pieces = chain(3)
    prepare(tmp_path)
    write_run(RunStore(tmp_path, NAMESPACE), ROOT, pieces)
    told = [
        each for each in await news_of(tmp_path, *before, Announce()) if isinstance(each, Catalogue)
    ]
    keys: list[bytes] = []
    for each in told:
        keys += [ref.key for run in each.runs for ref in run.blocks]
        assert not each.complete or keys == [piece.key for piece in pieces]
    assert [each.complete for each in told].count(True) == 1


@pytest.mark.parametrize("seed", range(6))
async def test_f6_a_snapshot_is_read_where_it_is(tmp_path: Path, seed: int) -> None:
    """A block may lie in two files, and its snapshot only in one of them: the other one is no
    damaged file."""
    with_snapshot = chain(1, seed=seed, snapshot_every=1)
    prepare(tmp_path)
    store = RunStore(tmp_path, NAMESPACE)
    write_run(
        store,
        ROOT,
        [
            attrs.evolve(with_snapshot[0], snapshot=None),
            *chain(1, parent=with_snapshot[0].key, seed=seed),
        ],
    )
    write_run(store, ROOT, with_snapshot)
    [piece] = with_snapshot
    wanted = BlockRef(piece.key, piece.tokens, payload=True, snapshot=True)
    told = await news_of(tmp_path, Announce(), Read(1, (wanted,)))
    [loaded] = [each for each in told if isinstance(each, Loaded)]
    assert same(loaded.blocks, with_snapshot)
    assert not [each for each in told if isinstance(each, RemovedFromDisk)]


async def test_r4_a_snapshot_that_is_nowhere_is_a_miss(tmp_path: Path) -> None:
    """Another rank may have written one where this one could not."""
    pieces = chain(2)
    prepare(tmp_path)
    write_run(RunStore(tmp_path, NAMESPACE), ROOT, pieces)
    wanted = tuple(
        BlockRef(piece.key, piece.tokens, payload=True, snapshot=True)
        for piece in chain(2, snapshot_every=3)
    )
    told = await news_of(tmp_path, Announce(), Read(1, wanted), Read(2, wanted))
    assert [each.blocks for each in told if isinstance(each, Loaded)] == [(), ()]
    assert len(all_runs(RunStore(tmp_path, NAMESPACE))) == 1
