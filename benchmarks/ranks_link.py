"""What the control link adds to a step, on rank 0 and on a follower: `python -m
benchmarks.ranks_link [ROWS]`.

The ledger's digest, the plan's bytes and back, a round trip on loopback, and the engine's own
digests, against decode steps of the embedded model by one rank. All but the round trip is CPU time,
turn by turn, so a busy machine does not matter.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import attrs
import numpy as np
import trio

from trouper.actors.ranks.expected_state import ExpectedState
from trouper.engine.loading.model_loading import load
from trouper.engine.step import StepEngine
from trouper.protocol.plans import Admit, Chunk, Plan, RowId, Stepped
from trouper.protocol.sampling import Sampling
from trouper.protocol.settings import Settings
from trouper.protocol.wire import decode, encode

STEPS = 40
PROMPT = 32


def cpu_ms(work: Callable[[], object], times: int = 1) -> float:
    """Of the whole process, all its threads."""
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times * 1000


class Link:
    """One step's part of RankMirror, on both sides."""

    def __init__(self, ledger: ExpectedState) -> None:
        self.ledger = ledger
        self.plan = Plan(0)

    def send(self, bare: Plan) -> None:
        plan = attrs.evolve(bare, digest=self.ledger.digest())
        self.ledger.predict(plan)
        received = decode(encode(plan)[4:])
        assert isinstance(received, Plan), "a plan is a plan"
        self.plan = received


async def round_trip_ms(size: int) -> float:
    listener, *_ = await trio.open_tcp_listeners(0, host="127.0.0.1")
    times = []
    async with listener, trio.open_nursery() as nursery:
        nursery.start_soon(_echo, listener)
        client = await trio.open_tcp_stream(*listener.socket.getsockname())
        async with client:
            for _ in range(200):
                began = time.perf_counter()
                await client.send_all(bytes(size))
                await client.receive_some(65536)
                times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


async def _echo(listener: trio.SocketListener) -> None:
    stream = await listener.accept()
    async with stream:
        async for data in stream:
            await stream.send_all(data)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    loaded = load(Settings(no_ssd=True), lambda _: None)
    engine, ledger = StepEngine(loaded.model, loaded.card.vocab_size), ExpectedState()
    link, rows = Link(ledger), tuple(RowId(row) for row in range(count))
    random = np.random.RandomState(0)
    admit = tuple(
        Admit(
            row,
            random.randint(1000, 40000, PROMPT).astype("<i4").tobytes(),
            Sampling(temperature=0),
        )
        for row in rows
    )

    def step() -> Stepped:
        stepped = engine.collect(engine.launch(link.plan))
        ledger.correct(stepped)
        return stepped

    link.send(Plan(0, admit=admit, prefill=tuple(Chunk(row, PROMPT) for row in rows)))
    step()
    sending, steps, comparing = [], [], []
    for number in range(1, STEPS):
        sending.append(cpu_ms(lambda number=number: link.send(Plan(number, decode=rows))))  # type: ignore[misc]
        expected = link.plan.digest
        assert expected is not None, "with several ranks every plan has one"
        comparing.append(cpu_ms(lambda expected=expected: engine._digests.now(expected.settled), 5))  # type: ignore[misc]
        steps.append(cpu_ms(step))
    step_ms, send_ms, compare_ms = map(statistics.median, (steps, sending, comparing))
    trip_ms = trio.run(round_trip_ms, len(encode(link.plan)))
    print(
        f"{count} rows: a step {step_ms:.1f} ms of CPU; the plan's digest and bytes, there and "
        f"back, {send_ms:.3f} ms"
    )
    print(
        f"the engine's digest {compare_ms:.3f} ms; {len(encode(link.plan))} bytes there and back "
        f"on loopback {trip_ms:.3f} ms"
    )
    print(f"together {(send_ms + compare_ms + trip_ms) / step_ms:.2%} of the step")


main()
