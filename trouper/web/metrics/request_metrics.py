"""Metrics counted from ended requests, as an observer of the request log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import attrs

from trouper.protocol.health import NO_LATENCIES
from trouper.protocol.histogram import Histogram
from trouper.protocol.record import RequestRecord

WAIT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
"""Buckets in seconds; these and the other buckets here are vLLM's."""
PHASE_BOUNDS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
WAITS, PHASES = Histogram.of(*WAIT_BOUNDS_S), Histogram.of(*PHASE_BOUNDS_S)
LENGTHS = Histogram.of(*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 1_000_000)
"""Buckets in tokens. The same for every model, where vLLM's end at the model's context."""


@attrs.frozen
class Measure:
    """One measurement of a request, and its histogram."""

    name: str
    help: str
    empty: Histogram
    of: Callable[[RequestRecord], float | None]
    """Reads the value of a record; None: this record does not count."""


def _if_complete(of: Callable[[RequestRecord], float | None]) -> Callable[[RequestRecord], float | None]:
    """Restrict a measurement to complete answers: an aborted answer does not show how long a complete one takes."""
    return lambda record: of(record) if record.reason in ("stop", "length") else None


MEASURES = (
    Measure(
        "vllm:time_to_first_token_seconds",
        "From a request's arrival to its first token.",
        WAITS,
        lambda record: record.first_token_s,
    ),
    Measure(
        "vllm:request_time_per_output_token_seconds",
        "Mean time between the tokens of a complete answer.",
        NO_LATENCIES,
        _if_complete(lambda record: record.mean_inter_token_latency_s),
    ),
    Measure(
        "vllm:e2e_request_latency_seconds",
        "From arrival to the last token, of complete answers.",
        PHASES,
        _if_complete(lambda record: _after(record.arrived_at, record.done_at)),
    ),
    Measure(
        "vllm:request_queue_time_seconds",
        "From a request's arrival until it had a row.",
        PHASES,
        lambda record: record.queue_s,
    ),
    Measure(
        "vllm:request_inference_time_seconds",
        "From its row to its last token, of complete answers.",
        PHASES,
        _if_complete(lambda record: record.inference_s),
    ),
    Measure(
        "vllm:request_prefill_time_seconds",
        "From its row to its first token.",
        PHASES,
        lambda record: record.prefill_s,
    ),
    Measure(
        "vllm:request_decode_time_seconds",
        "From the first token to the last one, of complete answers.",
        PHASES,
        _if_complete(lambda record: record.decode_s),
    ),
    Measure(
        "vllm:request_prompt_tokens",
        "Tokens of a request's prompt, of complete answers.",
        LENGTHS,
        _if_complete(lambda record: record.prompt_tokens),
    ),
    Measure(
        "vllm:request_generation_tokens",
        "Tokens of a complete answer.",
        LENGTHS,
        _if_complete(lambda record: record.generated_tokens),
    ),
    Measure(
        "vllm:request_max_num_generation_tokens",
        "The same: each choice of a request counts on its own.",
        LENGTHS,
        _if_complete(lambda record: record.generated_tokens),
    ),
    Measure(
        "vllm:request_params_max_tokens",
        "Most tokens that an answer was allowed.",
        LENGTHS,
        _if_complete(lambda record: record.max_tokens),
    ),
    Measure(
        "vllm:request_prefill_kv_computed_tokens",
        "Tokens of a prompt that were computed, since no cache had them; of complete answers.",
        LENGTHS,
        _if_complete(lambda record: record.prompt_tokens - record.cached_tokens),
    ),
)


def _after(begin: float, end: float | None) -> float | None:
    return None if end is None else end - begin


EXPECTED = (
    ("refused", "queue_full"),
    ("refused", "model_unusable"),
    ("error", "queue_timeout"),
    ("error", "first_token_timeout"),
    ("error", "token_timeout"),
    ("error", "request_timeout"),
    ("error", "engine_stopped"),
    ("error", "request_crashes_engine"),
    ("refused", "request_crashes_engine"),
)
"""Problems that are counted from the start: the first value of a series that did not exist before is no increase to
`rate()`."""


@attrs.define
class ModelRequestCounts:
    """Counts of one model's requests."""

    histograms: dict[str, Histogram] = attrs.field(
        factory=lambda: {measure.name: measure.empty for measure in MEASURES}
    )
    reasons: Counter[str] = attrs.field(factory=lambda: Counter(stop=0, length=0, abort=0, error=0))
    problems: Counter[tuple[str, str]] = attrs.field(factory=lambda: Counter(dict.fromkeys(EXPECTED, 0)))
    """Counts by (reason, code)."""
    disk_tokens: int = 0

    def add(self, record: RequestRecord) -> None:
        if record.code:
            self.problems[record.reason, record.code] += 1
        if record.reason == "refused":
            return
        self.reasons[record.reason] += 1
        self.disk_tokens += record.disk_tokens
        for measure in MEASURES:
            value = measure.of(record)
            if value is not None:
                self.histograms[measure.name] = self.histograms[measure.name].with_value(value)


class RequestCounts:
    """Counts of all models. They survive unloading a model."""

    def __init__(self) -> None:
        self._of: dict[str, ModelRequestCounts] = {}

    def observe(self, record: RequestRecord) -> None:
        self.of(record.model).add(record)

    def of(self, model: str) -> ModelRequestCounts:
        return self._of.setdefault(model, ModelRequestCounts())
