"""The definition of a metric: name, kind and help, and the function that reads its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Literal, TypeVar

import attrs
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from trouper.actors.runtime.channels import Health
from trouper.actors.runtime.runtime import Runtime
from trouper.protocol.health import ChannelStats
from trouper.protocol.histogram import Histogram

Value = float | Histogram
Kind = Literal["gauge", "counter", "histogram"]
Labelled = tuple[tuple[str, ...], Value]
Source = TypeVar("Source")


@attrs.frozen
class ModelScrape:
    runtime: Runtime
    health: Health
    channels: tuple[ChannelStats, ...]


@attrs.frozen
class MetricFamily:
    """A metric's kind, name, help and labels. `name` as Prometheus shows it, with `_total`."""

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...]

    def family(self, values: Iterable[Labelled]) -> Metric:
        match self.kind:
            case "gauge":
                gauge = GaugeMetricFamily(self.name, self.help, labels=self.labels)
                for labels, value in values:
                    gauge.add_metric(labels, _number(value))
                return gauge
            case "counter":
                counter = CounterMetricFamily(self.name, self.help, labels=self.labels)
                for labels, value in values:
                    counter.add_metric(labels, _number(value))
                return counter
            case "histogram":
                histogram = HistogramMetricFamily(self.name, self.help, labels=self.labels)
                for labels, value in values:
                    assert isinstance(value, Histogram)
                    buckets = [(_bound(bound), count) for bound, count in value.buckets]
                    histogram.add_metric(labels, buckets, value.total)
                return histogram


@attrs.frozen
class ModelMetric(Generic[Source]):
    """A metric of each model with a `Source`. `labels`: those beside the model's."""

    kind: Kind
    name: str
    help: str
    of: Callable[[Source], Value | Iterable[Labelled]]
    labels: tuple[str, ...] = ()

    @property
    def named(self) -> MetricFamily:
        """The metric with the model's labels. vLLM numbers engines; a model has one here."""
        model_labels = (
            ("model_name", "engine") if self.name.startswith("vllm:") else ("model_name",)
        )
        return MetricFamily(self.kind, self.name, self.help, model_labels + self.labels)

    def values(self, model: str, source: Source) -> Iterable[Labelled]:
        found = self.of(source)
        model_labels = (model, "0") if self.name.startswith("vllm:") else (model,)
        for labels, value in [((), found)] if isinstance(found, int | float | Histogram) else found:
            yield model_labels + labels, value


def _number(value: Value) -> float:
    assert not isinstance(value, Histogram)
    return value


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(float(bound))
