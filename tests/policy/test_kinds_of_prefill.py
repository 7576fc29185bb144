"""Each kind of work is measured for itself, and none keeps another from its turn."""

from __future__ import annotations

from trouper import Settings
from trouper.actors.scheduling.prefill_budget import (
    AIM,
    FIRST_CHUNK_TOKENS,
    WORKS,
    PrefillBudget,
    Work,
)
from trouper.protocol.plans import Chunk, Plan, RowId, Stepped

ROW = RowId(1)
STALL_S = 0.3


def small_budget() -> PrefillBudget:
    return PrefillBudget.of(Settings(decode_stall_ms=STALL_S * 1000))


def play(
    one: PrefillBudget, work: Work, seconds_a_token: float, steps: int = 30, *, busy: bool = True
) -> list[tuple[int, float]]:
    """Tokens and seconds of each step of a long prompt."""
    played = []
    for step in range(steps):
        one.plan(work)
        tokens = one.budget(10**6, busy=busy, work=work)
        plan = Plan(step, decode=(RowId(2),) if busy else (), prefill=(Chunk(ROW, tokens),))
        seconds = tokens * seconds_a_token
        one.answered(plan, Stepped(step, seconds=seconds))
        played.append((tokens, seconds))
    return played


def test_a_dear_kind_of_work_begins_small_whatever_was_learnt_of_a_cheap_one() -> None:
    """`echo` with log-probabilities on 7,000 tokens made a gap of 0.9 s: its first chunk was as
    large as one without."""
    one = small_budget()
    cheap = play(one, "text", 0.001)
    assert cheap[-1][0] > 10 * FIRST_CHUNK_TOKENS
    dear = play(one, "score", 0.01)
    assert max(seconds for _, seconds in dear) <= STALL_S
    assert dear[-1][1] > STALL_S * AIM / 2, "and becomes as large as the bound allows"
    assert play(one, "text", 0.001, 1)[0][0] >= cheap[-1][0], "which changes nothing of the others"


def test_the_rate_of_prefill_is_that_of_texts() -> None:
    one = small_budget()
    play(one, "text", 0.001)
    before = one.prefill_rate
    play(one, "score", 0.1)
    play(one, "embed", 0.1, busy=False)
    assert one.prefill_rate == before > 0


def test_each_kind_has_its_turn() -> None:
    one, turns = small_budget(), []
    for _ in range(6):
        turns.append(one.turn(WORKS))
        one.plan(turns[-1])
    assert turns == [*WORKS, *WORKS]
    assert one.turn({"score"}) == "score"


def test_two_plans_in_flight_are_told_apart() -> None:
    one = small_budget()
    for step, work in enumerate(WORKS[:2]):
        one.plan(work)
        assert one.turn(WORKS) != work, step
    one.answered(Plan(0, decode=(ROW,), prefill=(Chunk(ROW, 16),)), Stepped(0, seconds=0.01))
    one.answered(Plan(1, decode=(ROW,), prefill=(Chunk(ROW, 16),)), Stepped(1, seconds=10.0))
    assert one.budget(10**6, busy=True) > one.budget(10**6, busy=True, work="score")
