"""GET /metrics, read by Prometheus' own parser."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from prometheus_client.parser import text_string_to_metric_families

from tests.web.serving import Served, exchange, get

Labels = tuple[tuple[str, str], ...]


@attrs.frozen
class Scraped:
    """Samples by name and labels, and kinds by the family's name."""

    samples: Mapping[tuple[str, Labels], float]
    kinds: Mapping[str, str]
    text: str

    def value(self, name: str, **labels: str) -> float:
        """Of the one sample with these labels, and perhaps more."""
        [found] = self.values(name, **labels)
        return found

    def values(self, name: str, **labels: str) -> list[float]:
        wanted = set(labels.items())
        return [
            value
            for (one, own), value in self.samples.items()
            if one == name and wanted <= set(own)
        ]


async def scrape(served: Served, headers: str = "") -> Scraped:
    status, answered, body = await exchange(served, get("/metrics", headers))
    assert status == 200
    assert answered["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return read_text(body.decode())


def read_text(text: str) -> Scraped:
    families = [*text_string_to_metric_families(text)]
    samples = {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in families
        for one in family.samples
    }
    assert len(samples) == sum(len(family.samples) for family in families), "each sample once"
    return Scraped(samples, {family.name: family.type for family in families}, text)
