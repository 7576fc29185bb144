"""Streams and prompts on a virtual clock: steps cost what data says, not what a machine does."""

from __future__ import annotations

import random
from typing import Any

import attrs

from tests.core.driving import DrivenCore
from trouper.protocol.plans import Plan, RowId, Stepped


@attrs.frozen
class Costs:
    """Seconds of a step's passes."""

    decode_s: float
    """Of a decode pass without rows."""
    row_s: float = 0.0
    key_s: float = 0.0
    """Of each key that a decoding row reads."""
    pass_s: float = 0.0
    """Of a pass over prompts without tokens."""
    token_s: float = 0.001
    pair_s: float = 0.0
    """Of each key that a prompt's token reads."""
    scatter: float = 0.0
    """Standard deviation of the logarithm of a step's seconds: what else the machine does."""


ONE_THREAD = Costs(0.05, 0.007, 4.8e-6, 0.07, 0.0035, 2.6e-6)
"""The embedded model on one thread of a CPU (benchmarks/RESULTS.md, "Exp on a CPU")."""


class CostedCore(DrivenCore):
    """`now` is the sum of what the steps cost, of which two are in flight."""

    def __init__(self, costs: Costs, **settings: Any) -> None:
        super().__init__(prefill_batch_size=32, **settings)
        self.costs, self.times = costs, list[tuple[Plan, float]]()
        self._lengths: dict[RowId, int] = {}
        self._dice = random.Random(1)

    def _answer(self, plan: Plan) -> Stepped:
        for row in plan.drop:
            self._lengths.pop(row, None)
        stepped = attrs.evolve(super()._answer(plan), seconds=self._seconds(plan))
        self.times.append((plan, stepped.seconds))
        return stepped

    def _seconds(self, plan: Plan) -> float:
        costs, seconds = self.costs, 0.0
        if plan.decode:
            keys = sum(self._lengths[row] for row in plan.decode)
            seconds += costs.decode_s + costs.row_s * len(plan.decode) + costs.key_s * keys
        if plan.prefill:
            seconds += costs.pass_s
        for chunk in plan.prefill:
            behind = self._lengths.get(chunk.row, 0) + chunk.tokens
            seconds += chunk.tokens * (costs.token_s + costs.pair_s * behind)
            self._lengths[chunk.row] = behind
        for row in plan.decode:
            self._lengths[row] += 1
        return seconds * self._dice.lognormvariate(0, costs.scatter)


@attrs.frozen
class Share:
    """How a prompt and streams shared the steps until the prompt's first token."""

    first_token_s: float
    longest_gap_s: float
    typical_gap_s: float
    """Median of the steps that also prefill."""
    gaps_over: float
    """Share of these steps that exceed the stall bound."""
    pace: float
    """Tokens a second of a stream, as a multiple of its pace before."""


def share(costs: Costs, streams: int, long: int, stall_ms: float) -> Share:
    """One prompt of `long` tokens among streams of 100 tokens, which have made 100 more."""
    core = CostedCore(costs, decode_stall_ms=stall_ms, completion_batch_size=streams + 1)
    for seed in range(streams):
        core.arrive(100, 100_000, seed)
    core.until_decoding()
    for _ in range(100):
        core.step()
    before_s = core.times[-1][1]
    began = len(core.times)
    core.arrive(long, 1000, 1000)
    core.step()
    core.until_decoding()
    steps = core.times[began:]
    seconds = [took for _, took in steps]
    shared = sorted(took for plan, took in steps if plan.prefill)
    return Share(
        sum(seconds),
        max(seconds),
        shared[len(shared) // 2],
        sum(took > stall_ms / 1000 for took in shared) / len(shared),
        before_s * len(seconds) / sum(seconds),
    )
