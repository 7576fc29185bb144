"""How prompts and streams share the steps: no prompt starves, and the stall bound is used."""

from __future__ import annotations

import attrs
import pytest

from tests.core.prefill_share import ONE_THREAD, CostedCore, Costs, share
from trouper.actors.scheduling.prefill_budget import AIM, MAX_AIM

SLOW = Costs(0.2, token_s=0.002)
"""Decoding alone takes longer than the bound of 50 ms."""


@pytest.mark.parametrize("stall_ms", [50, 1000])
def test_a_long_prompt_among_streams_gets_its_time_and_uses_the_bound(stall_ms: float) -> None:
    one = share(ONE_THREAD, 15, 6000, stall_ms)
    assert one.first_token_s < 300
    bound = max(stall_ms / 1000, 2 * 0.22)
    assert 0.95 * MAX_AIM * stall_ms / 1000 <= one.typical_gap_s
    assert one.longest_gap_s <= 1.5 * bound
    assert one.pace > 0.1


@pytest.mark.parametrize(("scatter", "typical"), [(0.03, 0.87), (0.08, 0.78), (0.15, 0.93 * AIM)])
def test_uneven_steps_aim_lower_so_that_few_exceed_the_bound(
    scatter: float, typical: float
) -> None:
    one = share(attrs.evolve(ONE_THREAD, scatter=scatter), 15, 6000, 1000)
    assert one.typical_gap_s >= typical
    assert one.gaps_over <= 0.06


def test_prompts_that_never_stop_coming_do_not_starve() -> None:
    """With a prompt in every step nothing said what decoding alone takes, and a prompt with a
    large batch got sixteen tokens a step for ever."""
    core = CostedCore(SLOW, decode_stall_ms=50)
    core.arrive(20, 10_000)
    for seed in range(1, 201):
        core.arrive(300, 20, seed)
        core.step()
    shared = [(plan, took) for plan, took in core.times[60:] if plan.prefill and plan.decode]
    assert len(shared) > 100, "prompts wait all the time"
    prefill_s = SLOW.token_s * sum(chunk.tokens for plan, _ in shared for chunk in plan.prefill)
    assert prefill_s > 0.3 * sum(took for _, took in shared)


def test_a_batch_that_became_small_has_the_bound_again() -> None:
    """While prompts wait: what a large batch took to decode counted until no prompt did."""
    core = CostedCore(Costs(0.02, row_s=0.02, token_s=0.001), decode_stall_ms=200)
    for seed in range(20):
        core.arrive(20, 60, seed)
    core.arrive(20, 10_000, 99)
    core.until_decoding()
    for _ in range(30):
        core.step()
    core.arrive(120_000, 10, 100)
    for _ in range(300):
        core.step()
    last = [took for plan, took in core.times[-20:] if plan.prefill]
    assert max(last) <= 0.2


def test_the_share_is_in_the_metrics() -> None:
    core = CostedCore(SLOW, decode_stall_ms=50)
    core.arrive(20, 1000)
    core.until_decoding()
    core.arrive(2000, 10, 1)
    for _ in range(30):
        core.step()
    answered = core.times[: -len(core._in_flight)]
    shared = [took for plan, took in answered if plan.decode and plan.prefill]
    core.core.publish()
    stats = core.watches.stats.latest
    assert stats.shared_steps == len(shared) > 10
    assert stats.shared_step_seconds == pytest.approx(sum(shared))
    assert stats.decode_step_s == pytest.approx(SLOW.decode_s)
    assert stats.shared_step_bound_s == pytest.approx(2 * SLOW.decode_s)
