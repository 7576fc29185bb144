"""Metrics counted from ended requests, as an observer of the request log."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import attrs

from trouper.protocol.health import NO_LATENCIES
from trouper.protocol.histogram import FIRST_TOKEN_S, PHASE_S, REQUEST_TOKENS, Histogram
from trouper.protocol.record import RequestRecord

WAITS = Histogram.of(FIRST_TOKEN_S)
PHASES = Histogram.of(PHASE_S)
LENGTHS = Histogram.of(REQUEST_TOKENS)


@attrs.frozen
class Measure:
    name: str
    help: str
    empty: Histogram
    of: Callable[[RequestRecord], float | None]
    """Reads the value of a record; None: this record does not count."""


def _if_complete(
    of: Callable[[RequestRecord], float | None],
) -> Callable[[RequestRecord], float | None]:
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


# Problems that are counted from the start: the first value of a new series is no increase to
# `rate()`.
EXPECTED = (
    ("refused", "queue_full"),
    ("refused", "grammar_queue_full"),
    ("refused", "model_unusable"),
    ("refused", "preparation_timeout"),
    ("error", "queue_timeout"),
    ("error", "first_token_timeout"),
    ("error", "token_timeout"),
    ("error", "request_timeout"),
    ("error", "engine_stopped"),
    ("error", "request_crashes_engine"),
    ("refused", "request_crashes_engine"),
)


@attrs.define
class ModelRequestCounts:
    histograms: dict[str, Histogram] = attrs.field(
        factory=lambda: {measure.name: measure.empty for measure in MEASURES}
    )
    reasons: Counter[str] = attrs.field(factory=lambda: Counter(stop=0, length=0, abort=0, error=0))
    problems: Counter[tuple[str, str]] = attrs.field(
        factory=lambda: Counter(dict.fromkeys(EXPECTED, 0))
    )
    adapters: Counter[str] = attrs.field(factory=Counter)
    """Counts by LoRA adapter, of requests that named one."""
    disk_tokens: int = 0

    def add(self, record: RequestRecord) -> None:
        if record.code:
            self.problems[record.reason, record.code] += 1
        if record.reason == "refused":
            return
        self.reasons[record.reason] += 1
        if record.adapter:
            self.adapters[record.adapter] += 1
        self.disk_tokens += record.disk_tokens
        for measure in MEASURES:
            value = measure.of(record)
            if value is not None:
                self.histograms[measure.name] = self.histograms[measure.name].with_value(value)


class RequestCounts:
    """Counts of all models, which survive unloading a model."""

    def __init__(self) -> None:
        self._of: defaultdict[str, ModelRequestCounts] = defaultdict(ModelRequestCounts)

    def observe(self, record: RequestRecord) -> None:
        self.of(record.model).add(record)

    def of(self, model: str) -> ModelRequestCounts:
        return self._of[model]
