"""What is known when a server, or only its engine, begins again."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.storage.making import NAMESPACE, ROOT, chain
from trouper import Settings
from trouper.actors.writer import WriterEdges, write_to_disk
from trouper.protocol.health import DirectoryFacts, SchedulerFacts
from trouper.protocol.watch import Watch
from trouper.protocol.work import Announce, Catalogue, DiskNews, DiskOrder, Inspect, Sweep
from trouper.storage.directory import prepare
from trouper.storage.runs import RunStore


async def news_of(path: Path, *orders: DiskOrder) -> list[DiskNews]:
    """All that the writer says to these."""
    ordered, orders_in = trio.open_memory_channel[DiskOrder](10)
    told, news = trio.open_memory_channel[DiskNews](10)
    edges = WriterEdges(orders_in, told, Watch(DirectoryFacts()), Watch(SchedulerFacts()))
    for order in orders:
        ordered.send_nowait(order)
    ordered.close()
    await write_to_disk(edges, path, NAMESPACE, Settings())
    told.close()
    return [each async for each in news]


@pytest.mark.parametrize("before", [(), (Sweep(1e6),), (Sweep(1e6), Inspect()), (Inspect(), Sweep(1e6))])
async def test_the_catalogue_is_whole_when_all_was_told(tmp_path: Path, before: tuple[DiskOrder, ...]) -> None:
    """The janitor's orders come first at the start, and a sweep that finds nothing new is no catalogue."""
    pieces = chain(3)
    prepare(tmp_path)
    RunStore(tmp_path, NAMESPACE).write(ROOT, pieces)
    told = [each for each in await news_of(tmp_path, *before, Announce()) if isinstance(each, Catalogue)]
    keys: list[bytes] = []
    for each in told:
        keys += [piece.key for piece in each.pieces]
        assert not each.whole or keys == [piece.key for piece in pieces]
    assert [each.whole for each in told].count(True) == 1
