"""The seconds of a step, where a device takes a step while the one before it runs. From them follow
the size of chunks, and whether a disk is faster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from tests.families import build, prompts
from tests.family_configs import VOCABULARY
from trouper.engine.prefill import run_chunks
from trouper.engine.step import StepEngine
from trouper.protocol.plans import Admit, Chunk, Plan, RowId
from trouper.protocol.sampling import Sampling

ROW = RowId(0)
RUN_CHUNKS = "trouper.engine.step.run_chunks"


@attrs.define
class Clock:
    """Stands still but for what a test says."""

    now: float = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """To build and send a chunk of a prompt takes 1 s for each token, and the device has finished
    by then."""
    clock = Clock()
    monkeypatch.setattr(
        "trouper.engine.step.time", SimpleNamespace(perf_counter=clock.perf_counter)
    )

    def slowly(rows: Any, state: Any, chunks: tuple[Chunk, ...], *more: Any) -> Any:
        clock.now += sum(chunk.tokens for chunk in chunks)
        return run_chunks(rows, state, chunks, *more)

    monkeypatch.setattr(RUN_CHUNKS, slowly)
    return clock


def plans() -> tuple[Plan, Plan]:
    [prompt] = prompts((40,))
    admit = Admit(ROW, np.array(prompt, "<i4").tobytes(), Sampling(temperature=0))
    return Plan(0, admit=(admit,), prefill=(Chunk(ROW, 10),)), Plan(1, prefill=(Chunk(ROW, 30),))


def test_a_chunk_takes_at_least_as_long_as_its_launch(clock: Clock) -> None:
    """The step before it is read behind that launch: without it a chunk would seem to take no time,
    and each disk would seem slow."""
    engine = StepEngine(build("llama"), VOCABULARY)
    first, second = (engine.launch(plan) for plan in plans())
    assert (engine.collect(first).seconds, engine.collect(second).seconds) == (40, 30)


def test_a_read_within_a_launch_is_no_part_of_it(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the last step is read once the graph of the next one is built."""
    engine = StepEngine(build("llama"), VOCABULARY)
    one, other = plans()
    first = engine.launch(one)

    def finishes(*_: object) -> None:
        clock.now += 5

    def reads_first(*given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            # The device has the first step still.
            patch.setattr("trouper.engine.step.mx.eval", finishes)
            engine.collect(first)
        clock.now += 30
        return run_chunks(*given)

    monkeypatch.setattr(RUN_CHUNKS, reads_first)
    second = engine.launch(other)
    assert engine.collect(first).seconds == 15
    assert second.launch_s == engine.collect(second).seconds == 30
