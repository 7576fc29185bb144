"""The event loop gives plans to the engine's thread (trouper/engine/host.py)."""

from __future__ import annotations

import time
from queue import SimpleQueue

import pytest

from trouper.engine import host
from trouper.engine.step_loop import Waiting
from trouper.protocol.plans import Admit, Chunk, Plan, RowId
from trouper.protocol.sampling import Sampling

ADMIT = Admit(RowId(1), b"\1\0\0\0", Sampling())
PREFILL = (Chunk(RowId(1), 1),)


@pytest.mark.parametrize(
    ("plan", "leaves"),
    [
        (Plan(1, admit=(ADMIT,), prefill=PREFILL), True),
        (Plan(1, admit=(ADMIT,), prefill=PREFILL, decode=(RowId(2),)), False),
        (Plan(1, decode=(RowId(1),)), False),
        (Plan(1, prefill=PREFILL), False),
    ],
    ids=["the first one of an idle engine", "others decode", "no prompt", "more of a prompt"],
)
def test_python_s_lock_is_left_to_an_engine_that_waits(
    plan: Plan, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: Waiting = SimpleQueue()
    there_at_sleep = list[bool]()
    monkeypatch.setattr(time, "sleep", lambda _: there_at_sleep.append(not waiting.empty()))
    host.hand_over(waiting, plan)
    assert waiting.get_nowait() is plan
    assert there_at_sleep == [True] * leaves
