"""How much prompt the next step prefills: what running streams allow, and what an idle device does
at once."""

from __future__ import annotations

import pytest

from trouper import Settings
from trouper.actors.scheduling.prefill_budget import (
    AIM,
    IDLE_STEP_S,
    MIN_BUSY_TOKENS,
    REST,
    PrefillBudget,
)
from trouper.protocol.plans import Chunk, Plan, RowId, Stepped

STALL_MS = 200.0
ROW = RowId(1)


def pace(**more: float) -> PrefillBudget:
    return PrefillBudget.of(Settings(decode_stall_ms=STALL_MS, **more))  # type: ignore[arg-type]


def step(pace: PrefillBudget, seconds: float, *, prefilled: int = 0, decodes: bool = False) -> None:
    plan = Plan(
        0,
        decode=(ROW,) if decodes else (),
        prefill=(Chunk(RowId(2), prefilled),) if prefilled else (),
    )
    pace.answered(plan, Stepped(0, seconds=seconds))


def settled(
    fixed_s: float, token_s: float, *, busy: bool, steps: int = 60
) -> tuple[PrefillBudget, float]:
    """After many steps on a device of this speed; and how long the last one took."""
    one, took = pace(), 0.0
    for _ in range(steps):
        tokens = one.budget(10**9, busy=busy)
        took = fixed_s + tokens * token_s
        step(one, took, prefilled=tokens, decodes=busy)
        if busy:
            step(one, fixed_s, decodes=True)
    return one, took


@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.01, 0.001), (0.02, 0.0005), (0.001, 0.002)])
def test_d6_beside_streams_a_step_keeps_within_the_stall_bound_and_uses_it(
    fixed_s: float, token_s: float
) -> None:
    _, took = settled(fixed_s, token_s, busy=True)
    assert STALL_MS / 1000 * AIM / 2 <= took <= STALL_MS / 1000 * AIM * 1.01


@pytest.mark.parametrize("token_s", [0.001, 0.002])
def test_while_nobody_decodes_steps_are_long(token_s: float) -> None:
    one, took = settled(0.01, token_s, busy=False)
    assert IDLE_STEP_S / 2 <= took <= IDLE_STEP_S * 1.01
    busy = one.budget(10**9, busy=True)
    assert busy * token_s <= STALL_MS / 1000 * AIM, (
        "a stream that begins now is not made to wait so long"
    )
    assert busy > MIN_BUSY_TOKENS, "what idle steps took is a first guess"


def test_a_guess_counts_only_until_something_was_measured() -> None:
    one, _ = settled(0.01, 0.001, busy=True)
    before = one.budget(10**9, busy=True)
    for _ in range(20):
        step(one, 0.001, prefilled=64)
    assert one.budget(10**9, busy=True) == before


def test_a_little_that_is_left_is_prefilled_with_the_rest() -> None:
    one, _ = settled(0.01, 0.001, busy=False)
    chunk = one.budget(10**9, busy=False)
    most = int(REST * chunk)
    assert [one.budget(left, busy=False) for left in (1, chunk, most, most + 1, 10 * chunk)] == [
        1,
        chunk,
        most,
        chunk,
        chunk,
    ]


def test_where_decoding_alone_is_slow_prefill_may_take_as_long_again() -> None:
    """Else a prompt beside a large batch would get a few tokens a step, and its client wait for
    minutes."""
    slow, took = settled(0.3, 0.001, busy=True)
    assert 0.5 * 0.6 <= took <= 0.61
    assert slow.budget(10**9, busy=True) > 4 * MIN_BUSY_TOKENS


def test_the_rate_follows_the_device() -> None:
    one, _ = settled(0.0, 0.001, busy=False)
    assert one.prefill_rate == pytest.approx(1000, rel=0.01)
    for _ in range(30):
        step(one, 0.4, prefilled=100)
    assert one.prefill_rate == pytest.approx(250, rel=0.02)
