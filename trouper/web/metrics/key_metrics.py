"""Metrics by key. Their series are bounded by the keys that there are, and the models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import Metric

from trouper.web.keys.key_limits import KeyAccount, ModelUsage
from trouper.web.metrics.metric import MetricFamily

LABELS = ("key", "model_name")
KEY_METRICS = tuple(
    (MetricFamily("counter", f"trouper_key_{name}_total", text, LABELS), name)
    for name, text in (
        ("requests", "Requests of a key that were let in."),
        ("prompt_tokens", "Tokens of its prompts, cached ones among them."),
        ("cached_tokens", "Tokens of these that need not be computed."),
        ("completion_tokens", "Tokens of its answers."),
    )
)


def key_metrics(accounts: Callable[[], Sequence[KeyAccount]]) -> Iterator[Metric]:
    for family, name in KEY_METRICS:
        yield family.family(
            ((account.key.label, model), getattr(used, name))
            for account in accounts()
            for model, used in _used(account)
        )


def _used(account: KeyAccount) -> list[tuple[str, ModelUsage]]:
    return sorted(account.usage.items())
