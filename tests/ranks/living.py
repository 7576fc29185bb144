"""One rank that lives several times, with a cache directory that outlives it: `python -m
tests.ranks.living SPEC`, a JSON list of lives. Its last line is what rank 0 was answered in each,
and what the disks did.

The processes stay, and with them MLX's group; everything of ours begins anew: engine, graph, links,
disks.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import attrs
import trio

from tests.reuse.serving import BLOCK, SNAPSHOT, Ask, hear, text
from trouper import Runtime, Settings
from trouper.actors.graph import run_graph
from trouper.actors.ranks.follower import Follower
from trouper.actors.ranks.leader import Leader
from trouper.actors.scheduling.cache_namespace import cache_namespace
from trouper.engine.host import MlxEngine
from trouper.protocol.model import LoadedModel
from trouper.protocol.setting_fields import ByteSize
from trouper.storage.run_format import SUFFIX

PATIENCE_S = 60.0
RANK = int(os.environ.get("MLX_RANK", "0"))


class Remembering(MlxEngine):
    """Which namespace is this rank's, of each model."""

    namespaces: ClassVar[dict[str | None, str]] = {}

    async def load(self) -> LoadedModel:
        model = await super().load()
        self.namespaces[self._settings.model] = cache_namespace(model.card, self._settings)
        return model


@attrs.frozen
class Life:
    """`asks`: one after another, each (prompt's tokens, seed). `settle`: so many blocks must be on
    every rank's disk before it ends, and so many files have been found `damaged` by followers.
    `spoil`: before it begins, (rank, what becomes of its files)."""

    model: str
    asks: Sequence[tuple[int, int]]
    settings: dict[str, Any] = attrs.field(factory=dict)
    settle: int = 0
    damaged: int = 0
    spoil: tuple[int, str] | None = None

    @property
    def chosen(self) -> Settings:
        chosen: dict[str, Any] = {"no_ssd": True} | self.settings
        if "ssd_cache_dir" in chosen:
            chosen |= {"no_ssd": False, "ssd_cache_dir": Path(chosen["ssd_cache_dir"])}
        return Settings(
            model=self.model,
            block_size=BLOCK,
            snapshot_tokens=SNAPSHOT,
            ssd_keep_free=ByteSize(0),
            **chosen,
        )


def spoil(life: Life) -> None:
    if life.spoil is None or life.spoil[0] != RANK:
        return
    mine = Path(life.settings["ssd_cache_dir"]) / Remembering.namespaces[life.model][:32]
    files = sorted(mine.glob("*" + SUFFIX), key=lambda path: path.stat().st_mtime_ns)
    assert files, f"nothing is there to spoil in {mine}"
    match life.spoil[1]:
        case "remove":
            shutil.rmtree(mine)
        case "damage the last":
            data = bytearray(files[-1].read_bytes())
            data[-5] ^= 0xFF
            files[-1].write_bytes(data)


async def lead(life: Life) -> dict[str, Any]:
    settings = life.chosen
    leader = Leader(settings)
    async with trio.open_nursery() as nursery:
        start = partial(run_graph, settings, Remembering(settings), ranks=leader)
        runtime: Runtime = await nursery.start(start)
        told = await _ask_all(life, leader, runtime)
        assert await runtime.drain(10)
    assert not leader.lost.is_set(), leader.reason
    return told


async def _ask_all(life: Life, leader: Leader, runtime: Runtime) -> dict[str, Any]:
    heard = []
    for tokens, seed in life.asks:
        ask = Ask(text(tokens, seed))
        heard.append(await hear(ask, await runtime.submit(ask.request())))
    while min(_stored(leader, runtime)) < life.settle or _damaged(leader) < life.damaged:  # noqa: ASYNC110
        await trio.sleep(0.01)
    facts = runtime.health()
    return {
        "answers": [[one.tokens, [each.logprob for each in one.logprobs]] for one in heard],
        "cached": [one.cached for one in heard],
        "hits_disk": facts.scheduler.cache.hits_disk,
        "lacking": facts.directory.lacking,
        "attached": facts.directory.attached,
        "reason": facts.directory.reason,
        "others": {
            rank: attrs.asdict(one) for rank, one in leader.directories().items() if one is not None
        },
    }


def _stored(leader: Leader, runtime: Runtime) -> list[int]:
    """Of each rank, as it told with its last beat."""
    others = [0 if facts is None else facts.blocks for facts in leader.directories().values()]
    return [runtime.health().directory.blocks, *others]


def _damaged(leader: Leader) -> int:
    return sum(facts.damaged for facts in leader.directories().values() if facts is not None)


async def follow(life: Life) -> None:
    settings = life.chosen
    follower = Follower(settings, Remembering(settings))
    await follower.run()
    assert not follower.reason, follower.reason


async def live(lives: Sequence[Life]) -> list[Any]:
    told: list[Any] = []
    for life in lives:
        spoil(life)
        with trio.fail_after(PATIENCE_S):
            told.append(await (lead if RANK == 0 else follow)(life))
    return told


def main() -> None:
    lives = [Life(**one) for one in json.loads(sys.argv[1])]
    sys.stdout.write(json.dumps(trio.run(live, lives)) + "\n")


if __name__ == "__main__":
    main()
