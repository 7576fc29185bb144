"""What is counted of a request when it has ended, and how histograms count."""

from __future__ import annotations

from bisect import bisect_left
from math import inf

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.protocol.histogram import Histogram
from trouper.protocol.record import Reason, RequestRecord
from trouper.web.metrics.request_metrics import MEASURES, ModelRequestCounts

WHOLE = RequestRecord(
    request_id="r",
    reason="stop",
    code="",
    model="m",
    endpoint="/v1/completions",
    prompt_tokens=10,
    cached_tokens=4,
    disk_tokens=3,
    generated_tokens=5,
    max_tokens=9,
    arrived_at=100.0,
    admitted_at=101.0,
    first_token_at=103.0,
    last_token_at=111.0,
    ended_at=112.0,
)
PHASES = {
    "vllm:time_to_first_token_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
}
"""What also says something of an answer that was cut short."""


def counted(*records: RequestRecord) -> ModelRequestCounts:
    counts = ModelRequestCounts()
    for record in records:
        counts.add(record)
    return counts


def totals(counts: ModelRequestCounts) -> dict[str, float]:
    return {name: one.total for name, one in counts.histograms.items() if one.count}


def test_a_whole_answer_is_measured_in_all_its_phases() -> None:
    assert totals(counted(WHOLE)) == {
        "vllm:time_to_first_token_seconds": 3.0,
        "vllm:request_time_per_output_token_seconds": 2.0,
        "vllm:e2e_request_latency_seconds": 11.0,
        "vllm:request_queue_time_seconds": 1.0,
        "vllm:request_inference_time_seconds": 10.0,
        "vllm:request_prefill_time_seconds": 2.0,
        "vllm:request_decode_time_seconds": 8.0,
        "vllm:request_prompt_tokens": 10.0,
        "vllm:request_generation_tokens": 5.0,
        "vllm:request_max_num_generation_tokens": 5.0,
        "vllm:request_params_max_tokens": 9.0,
        "vllm:request_prefill_kv_computed_tokens": 6.0,
    }
    assert {measure.name for measure in MEASURES} == {*totals(counted(WHOLE))}


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_of_half_an_answer_only_what_it_reached_is_measured(reason: Reason) -> None:
    counts = counted(
        attrs.evolve(WHOLE, reason=reason, code="token_timeout" if reason == "error" else "")
    )
    assert {*totals(counts)} == PHASES
    assert counts.reasons[reason] == 1
    assert counts.problems["error", "token_timeout"] == (reason == "error")


def test_what_was_refused_is_only_a_problem() -> None:
    counts = counted(attrs.evolve(WHOLE, reason="refused", code="queue_full"))
    assert totals(counts) == {} and counts.disk_tokens == 0
    assert counts.reasons.total() == 0
    assert counts.problems["refused", "queue_full"] == 1


def test_counts_add_up() -> None:
    counts = counted(WHOLE, attrs.evolve(WHOLE, reason="length"), WHOLE)
    assert (counts.reasons["stop"], counts.reasons["length"], counts.disk_tokens) == (2, 1, 9)
    assert {one.count for one in counts.histograms.values()} == {3}


@given(st.lists(st.tuples(st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 99.0]), st.integers(1, 4))))
def test_a_histogram_counts_values_up_to_each_bound(values: list[tuple[float, int]]) -> None:
    """As Prometheus has it: a value that is a bound belongs to it, and buckets add up."""
    histogram = Histogram.of((1.0, 2.0, 3.0))
    for value, times in values:
        histogram = histogram.with_value(value, times)
    every = sorted(value for value, times in values for _ in range(times))
    assert histogram.count == len(every)
    assert histogram.total == pytest.approx(sum(every))
    assert histogram.buckets == [
        (bound, bisect_left(every, bound + 1e-9)) for bound in (1.0, 2.0, 3.0, inf)
    ]
