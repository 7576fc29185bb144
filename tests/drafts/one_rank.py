"""One of two ranks that play mixes together: `python -m tests.drafts.one_rank DIRECTORY NAME SEED`.

Rank 0 is the whole graph of a mix, and compares with one rank, alone and without drafts; rank 1
follows it. Both draft; what the oracle of rank 1 must know comes through a FIFO. Its last line is
what was drafted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import tests.conftest  # noqa: F401 - the threads of BLAS, before MLX

# isort: split
import trio

from tests.drafts.mixes import Answers, Mix, alone, assert_the_same, drafting, thinking, together
from tests.drafts.models import saved_to_split
from tests.real.serving import settings_of
from trouper import Runtime, Settings
from trouper.actors.graph import run_graph
from trouper.actors.ranks.follower import Follower
from trouper.actors.ranks.leader import Leader
from trouper.engine.distributed import rank_group
from trouper.engine.host import MlxEngine


async def lead(settings: Settings, *, task_status: trio.TaskStatus[Runtime]) -> None:
    """As `run_runtime`, at rank 0."""
    leader = Leader(settings)

    async def watch() -> None:
        """The engine may wait for a lost rank for ever."""
        await leader.lost.wait()
        _end(leader.reason)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await run_graph(settings, MlxEngine(settings), ranks=leader, task_status=task_status)
        nursery.cancel_scope.cancel()


async def follow(settings: Settings) -> None:
    follower = Follower(settings, MlxEngine(settings))

    async def watch() -> None:
        await follower.ended.wait()
        if follower.reason:
            _end(follower.reason)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await follower.run()
        nursery.cancel_scope.cancel()


def _end(reason: str) -> None:
    sys.stderr.write(f"{reason}\n")
    sys.stderr.flush()
    os._exit(1)


async def play_first(path: str, mix: Mix, answers: trio.Path) -> tuple[int, int]:
    await mix.limit_memory(path)
    wanted = await alone(path, mix)
    said = [[*pair] for pair in wanted.answers.items()]
    await answers.write_text(json.dumps(said), encoding="utf-8")  # Until the other rank reads it.
    played = await together(path, mix, wanted, lead)
    await assert_the_same(path, mix, wanted, played)
    return played.facts.speculation.drafted, played.facts.speculation.accepted


async def play_second(path: str, mix: Mix, answers: trio.Path) -> tuple[int, int]:
    await mix.limit_memory(path)
    known: Answers = {
        tuple(prompt): tuple(said)
        for prompt, said in json.loads(await answers.read_text(encoding="utf-8"))
    }
    with drafting(mix, known):
        await follow(settings_of(path, **mix.settings))
    return 0, 0


def main(directory: Path, name: str, seed: int) -> None:
    first = rank_group.join().leads
    mix = Mix.of(name, seed)
    path = saved_to_split(name, directory, mix.head)
    mix.drafted_by(path, directory)
    with thinking():
        told = trio.run(
            play_first if first else play_second, path, mix, trio.Path(directory / "answers")
        )
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)  # What is left of a group in native code would be waited for.


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
