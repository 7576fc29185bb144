"""One seed at two ranks: one is lost, while the model is loaded or in the middle of streams.
Clients hear of it, all processes end, and the next group on the same directories answers right."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from random import Random

import trio

from tests.chaos.faults import DAY_S
from tests.chaos.house import House
from tests.chaos.playing import Seen, asked, continued, failed, judged, promises, settled
from tests.soak.wishes import Question

HEARD_S = 30.0
"""`--rank-timeout-s` is 4 s, and the machine may be busy."""
GONE_S, JOINED_S = 45.0, 150.0
"""A rank whose others never come waits for them for 120 s, in native code (docs/ranks.md); `trouper
launch` would end it."""
LOADS_S = 2.5


async def lose(house: House, questions: Sequence[Question], seed: int) -> tuple[str, Seen]:
    """(what was done, what became of it). Nothing of the house runs afterwards."""
    chance, seen = Random(seed), Seen()
    rank, how = chance.randrange(2), chance.choice((signal.SIGKILL, signal.SIGSTOP))
    loading = chance.random() < 0.4
    # It is the HTTP server: its clients hear nothing of one that is stopped.
    if rank == 0 and not loading:
        how = signal.SIGKILL
    moved_s = chance.choice((0.0, 0.0, DAY_S, -30 * DAY_S))
    house.start()
    house.dials().turn(moved_s, chance.choice((0.0, 0.0, 0.02)))
    if loading:
        await trio.sleep(chance.uniform(0, LOADS_S))
        house.send(how, rank)
    else:
        await trio.to_thread.run_sync(house.until_ready)
        await _during_streams(house, questions, (rank, how), chance, seen)
    codes = await trio.to_thread.run_sync(house.end, JOINED_S if loading else GONE_S)
    other = codes[1 - rank]
    if other is None:
        seen.broken.append(f"rank {1 - rank} goes on without rank {rank}: {house.said()}")
    elif other == 0:
        seen.broken.append(f"rank {1 - rank} ended with 0 although rank {rank} was lost")
    house.start()
    await trio.to_thread.run_sync(house.until_ready)
    for question in chance.sample(list(questions), 3):
        heard = await asked(house, question, "salt 0")
        outcome, broken = (
            judged(question, heard, ()) if heard else ("", f"nobody answers: {question.wish}")
        )
        seen.outcomes[outcome] += 1
        seen.broken += [f"the next group: {broken}"] if broken else []
    await settled(house)
    seen.broken += promises(house, None)
    house.kill()
    return (
        (
            f"rank {rank} {how.name} {'while loading' if loading else 'in streams'}, clock moved "
            f"by {moved_s:g} s"
        ),
        seen,
    )


async def _during_streams(
    house: House,
    questions: Sequence[Question],
    loss: tuple[int, signal.Signals],
    chance: Random,
    seen: Seen,
) -> None:
    """Clients ask all the time; each whole answer is right, and none waits for long after the
    loss."""
    rank, how = loss
    lost_at = float("inf")

    async def client(own: Random) -> None:
        while time.monotonic() < lost_at:
            question = own.choice(questions)
            heard = await asked(house, question, f"salt {own.randrange(4)}", "reads", own)
            if lost_at < time.monotonic() - HEARD_S or heard is None:
                seen.broken.append(
                    f"a client heard of the loss after more than {HEARD_S:.0f} s: {question.wish}"
                )
                return
            if time.monotonic() < lost_at or (heard.status == 200 and not failed(heard)):
                ended, broken = judged(question, heard, ())
                if time.monotonic() > lost_at and ended == "cut" and continued(question, heard):
                    broken = ""
                seen.outcomes[ended] += 1
                seen.broken += [broken] if broken else []

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(client, Random(chance.randrange(2**32)))
        await trio.sleep(chance.uniform(0.1, 1.0))
        lost_at = time.monotonic()
        house.send(how, rank)
