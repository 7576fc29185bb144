"""When each step is read: engine/step_loop.py, with an engine that only notes what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, cast

import attrs
import mlx.core as mx
import pytest

from trouper.engine.platform import device
from trouper.engine.prefill import Prefilled
from trouper.engine.sampling.sampling_batch import Sampled
from trouper.engine.step import Launched, StepEngine
from trouper.engine.step_loop import WAKE, ReadAhead, SideWork, StepLoop, Waiting, rows_alone
from trouper.engine.warm_up import IdleWork
from trouper.protocol.plans import Chunk, Plan, RowId, Stepped
from trouper.workarounds import mlx_reference_blas

ROW = RowId(7)
NOTHING = Prefilled(ready=None, complete=[], alone={}, scores=[], embedded=[])


@attrs.define
class NotingEngine:
    """Notes when the graph of a step is built, when it is sent to the device, and when it is
    read."""

    done: list[str]
    constrained: bool = False
    starting: Callable[[], None] | None = None
    nbytes: int = 0
    rows: set[RowId] = attrs.field(factory=set)

    def launch(self, plan: Plan) -> Launched:
        self.rows = self.rows - set(plan.drop) | set(plan.decode)
        self.done.append(f"build {plan.step}")
        if plan.decode and self.starting is not None:
            self.starting()
        self.done.append(f"send {plan.step}")
        sampled = self._sampled(plan) if plan.decode else None
        complete = [chunk.row for chunk in plan.prefill if chunk.row in plan.decode]
        prefilled = attrs.evolve(NOTHING, complete=complete)
        return Launched(plan=plan, at=0.0, prefilled=prefilled, persisted=[], sampled=sampled)

    def _sampled(self, plan: Plan) -> Sampled:
        return Sampled(
            rows=plan.decode,
            tokens=mx.zeros(1),
            logprobs=None,
            failed=(),
            numberless=mx.zeros(1),
            unusable=None,
            choiceless=None,
            is_lazy=not self.constrained,
        )

    def collect(self, launched: Launched) -> Stepped:
        self.done.append(f"read {launched.plan.step}")
        return Stepped(step=launched.plan.step, seconds=0.01)

    def lengths(self) -> dict[RowId, int]:
        return dict.fromkeys(self.rows, 1)


def decode(step: int, **more: Any) -> Plan:
    return Plan(step=step, decode=(ROW,), **more)


class LatePlans(SimpleQueue[Any]):
    """None of its plans is there before it is waited for."""

    def empty(self) -> bool:
        return True


def ran(
    plans: Sequence[Plan | str],
    *,
    ahead: bool,
    constrained: bool = False,
    waiting: Waiting | None = None,
    idle: Sequence[str] = (),
) -> list[str]:
    """What an engine does for these plans, which have all come, and then for the end."""
    done, results, waiting = list[str](), list[int](), waiting or SimpleQueue()
    for plan in (*plans, None):
        waiting.put(cast(Plan, plan))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "runs_ahead", lambda: ahead)
        patch.setattr(mlx_reference_blas, "load_fast", lambda: None)
        engine = cast(StepEngine, NotingEngine(done, constrained))
        StepLoop(
            engine,
            waiting,
            SideWork(),
            lambda stepped: results.append(stepped.step),
            IdleWork(partial(done.append, piece) for piece in idle),
        ).run()
    assert results == sorted(set(results)), "results come in the order of the plans"
    return done


def test_on_a_cpu_a_graph_is_built_while_the_step_before_it_runs() -> None:
    """That is read before the next one is sent: sending blocks for as long as most of a step."""
    assert ran([decode(1), decode(2), decode(3), Plan(step=4)], ahead=False) == [
        "build 1",
        "send 1",
        "build 2",
        "read 1",
        "send 2",
        "build 3",
        "read 2",
        "send 3",
        "read 3",
        "build 4",
        "send 4",
        "read 4",
    ]


def test_a_device_that_runs_ahead_has_the_next_step_before_the_last_one_is_read() -> None:
    assert ran([decode(1), decode(2), decode(3), Plan(step=4)], ahead=True) == [
        "build 1",
        "send 1",
        "build 2",
        "send 2",
        "read 1",
        "build 3",
        "send 3",
        "read 2",
        "build 4",
        "send 4",
        "read 3",
        "read 4",
    ]


AT_ONCE = ["build 1", "send 1", "read 1", "build 2", "send 2", "read 2"]


def test_on_a_cpu_a_step_whose_next_plan_is_not_there_is_read_at_once() -> None:
    assert ran([decode(1), decode(2)], ahead=False, waiting=LatePlans()) == AT_ONCE


def test_on_a_cpu_rows_with_grammars_are_read_at_once() -> None:
    """Their next graph is not built without values of this step."""
    assert ran([decode(1), decode(2), Plan(step=3)], ahead=False, constrained=True)[:6] == AT_ONCE


@pytest.mark.parametrize(
    "slow",
    [{"prefill": (Chunk(row=RowId(8), tokens=4),)}, {"drafts": (3,)}],
    ids=["prompt beside it", "drafts"],
)
def test_on_a_cpu_a_step_is_read_before_a_graph_that_waits_for_the_device(
    slow: dict[str, Any],
) -> None:
    """A chunk of a prompt takes as long as many steps: clients would get their tokens behind it."""
    assert ran([decode(1), decode(2, **slow), Plan(step=3)], ahead=False)[:6] == AT_ONCE
    assert rows_alone(decode(2, **slow)) == 0


def test_work_that_wakes_the_loop_changes_nothing() -> None:
    assert ran([decode(1), WAKE, decode(2)], ahead=False)[:5] == [
        "build 1",
        "send 1",
        "build 2",
        "read 1",
        "send 2",
    ]


class PlansAfterMoments(SimpleQueue[Any]):
    """Each plan comes after so many moments without one."""

    def __init__(self, *moments: int) -> None:
        self._moments = list(moments)

    def empty(self) -> bool:
        self._moments[0] -= 1
        return self._moments[0] >= 0

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self._moments.pop(0)
        return super().get(block, timeout)


def test_kernels_are_prepared_while_there_are_no_rows() -> None:
    """A piece takes as long as some steps, and the first plan waits for one piece alone."""
    drop = Plan(step=2, drop=(ROW,))
    moments = PlansAfterMoments(1, 1, 1, 2)
    pieces = ["first", "second", "third", "fourth"]
    assert ran([decode(1), drop, Plan(step=3)], ahead=True, waiting=moments, idle=pieces) == [
        "first",
        "build 1",
        "send 1",
        "build 2",
        "send 2",
        "read 1",
        "read 2",
        "second",
        "build 3",
        "send 3",
        "read 3",
        "third",
        "fourth",
    ]


def test_what_is_in_flight_at_the_end_is_waited_for() -> None:
    """Its arrays are the rows' buffers, which the session frees."""
    assert ran([decode(1)], ahead=True) == ["build 1", "send 1", "read 1"]


def test_what_is_read_at_once_does_not_count_as_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread always waits for a first token alone, and never for a plan without work: neither
    says whether it waits while rows decode."""
    waits: list[float] = []
    monkeypatch.setattr(ReadAhead, "record", lambda _, waited_s, step_s: waits.append(waited_s))
    first = decode(1, prefill=(Chunk(row=ROW, tokens=4),))
    assert ran([first, decode(2), decode(3), Plan(step=4)], ahead=True)[:5] == [
        "build 1",
        "send 1",
        "read 1",
        "build 2",
        "send 2",
    ]
    assert len(waits) == 2
