"""docs/metrics.md lists every metric and no other; the dashboard and the alerts ask for no
other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, ProcessCollector

from tests.web.scraping import scrape
from tests.web.serving import ask, serving
from trouper.cli import main
from trouper.protocol.problems import queue_full
from trouper.web.metrics.collector import ALL
from trouper.web.metrics.model_metrics import BANKS, DRAFTS, RANKS, MetricFamily
from trouper.web.metrics.request_metrics import EXPECTED, ModelRequestCounts

DOCS = Path(__file__).parent.parent.parent / "docs"


def printed(flag: str) -> str:
    """A file of the package, as the command prints it."""
    run = CliRunner().invoke(main, ["metrics", flag])
    assert run.exit_code == 0, run.output
    return run.stdout


def full_name(family: str, kind: str) -> str:
    """As samples have it."""
    return family + ("_total" if kind == "counter" else "")


ROW = re.compile(r"^- `(\S+)` \((\w+)(; only)?;?(.*?)\): (.*)$", re.MULTILINE)
PROCESS: list[MetricFamily[None]] = [
    MetricFamily(
        "counter" if one.type == "counter" else "gauge",
        full_name(one.name, one.type),
        one.documentation,
        lambda _: (),
    )
    for one in ProcessCollector(registry=CollectorRegistry()).collect()
]
"""None but on Linux."""


ABSENT = {
    *(one.name for one in (*RANKS, *BANKS, *DRAFTS)),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "trouper_malformed_calls_total",
    "trouper_key_refused_total",
    "trouper_adapter_requests_total",
}
"""Of one rank, of banks without rows, of drafts that nobody made, and without calls, refusals or
adapters there is nothing to tell."""


def usual_labels(name: str, only: str) -> tuple[str, ...]:
    """Labels that the page does not repeat."""
    if only or name.startswith("process_"):
        return ()
    return ("model_name", "engine") if name.startswith("vllm:") else ("model_name",)


def documented() -> dict[str, tuple[str, tuple[str, ...], str]]:
    rows = ROW.findall((DOCS / "metrics.md").read_text())
    assert len({name for name, *_ in rows}) == len(rows), "each once"
    return {
        name: (kind, (*usual_labels(name, only), *re.findall(r"`(\w+)`", labels)), said)
        for name, kind, only, labels, said in rows
        if PROCESS or not name.startswith("process_")
    }


def test_the_table_is_the_registry() -> None:
    ours = {one.name: (one.kind, one.labels, one.help) for one in (*ALL, *PROCESS)}
    assert documented() == ours


async def test_what_is_scraped_is_documented_and_what_is_documented_is_scraped() -> None:
    async with serving() as served:
        assert (await ask(served, {"prompt": "hello", "max_tokens": 2, "made_up": 1}))[0] == 200
        assert (await ask(served, {"prompt": "x" * 5000}))[0] == 400
        seen = await scrape(served)
    rows = documented()
    scraped = {full_name(name, kind): kind for name, kind in seen.kinds.items()}
    assert scraped == {name: kind for name, (kind, _, _) in rows.items()}
    labels = {name: {label for label, _ in own} - {"le"} for name, own in seen.samples}
    for name, (kind, wanted, _) in rows.items():
        sample = name + "_count" if kind == "histogram" else name
        assert labels.get(sample, set(wanted)) == set(wanted), name
        assert sample in labels or name in ABSENT, name


# -- the dashboard -------------------------------------------------------------------------------


def samples() -> Mapping[str, set[str]]:
    """What may be asked for, and by which labels. `job` and `instance` are the scraper's."""
    found: dict[str, set[str]] = {}
    for one in (*ALL, *PROCESS):
        labels = {*one.labels, "job", "instance"}
        if one.kind == "histogram":
            found |= {
                one.name + "_sum": labels,
                one.name + "_count": labels,
                one.name + "_bucket": labels | {"le"},
            }
        else:
            found[one.name] = labels
    return found


def asked(expr: Any, grouped: frozenset[str] = frozenset()) -> Iterator[tuple[str, set[str]]]:
    """(sample, labels that it is matched or grouped by) of an expression, at any depth."""
    match expr:
        case promql.VectorSelector():
            matched = {matcher.name for matcher in expr.matchers.matchers}
            yield str(expr.name), matched | grouped
        case promql.MatrixSelector():
            yield from asked(expr.vector_selector, grouped)
        case promql.AggregateExpr():
            yield from asked(
                expr.expr, grouped | frozenset(expr.modifier.labels if expr.modifier else ())
            )
        case promql.Call():
            for argument in expr.args:
                yield from asked(argument, grouped)
        case promql.BinaryExpr():
            yield from asked(expr.lhs, grouped)
            yield from asked(expr.rhs, grouped)
        case promql.ParenExpr():
            yield from asked(expr.expr, grouped)
        case promql.NumberLiteral():
            pass
        case _:
            raise AssertionError(f"not known here: {expr!r}")


def expressions() -> list[str]:
    board = json.loads(printed("--grafana"))
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(printed("--alerts"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def rules() -> dict[str, str]:
    """Expressions of the alerts, by name."""
    return {rule["alert"]: rule["expr"] for rule in alerts()}


def test_every_alert_says_whom_it_wakes() -> None:
    severities = [rule.get("labels") for rule in alerts()]
    assert {one["severity"] for one in severities if one} == {"critical", "warning"}
    assert all(severities)


@pytest.mark.parametrize("name", rules())
def test_every_alert_asks_for_what_there_is(name: str) -> None:
    known, found = {**samples(), "up": {"job", "instance"}}, [*asked(parsed(rules()[name]))]
    assert found
    for sample, labels in found:
        assert sample in known
        assert labels <= known[sample]


def test_codes_and_reasons_of_alerts_are_ours() -> None:
    """A label's value that never comes is an alert that never does."""
    text = "".join(rules().values())
    assert (
        set(re.findall(r'code="(\w+)"', text))
        == {queue_full(1).code, "model_unusable"}
        <= {code for _, code in EXPECTED}
    )
    assert set(re.findall(r'finished_reason="(\w+)"', text)) <= set(ModelRequestCounts().reasons)


def parsed(expression: str) -> Any:
    """Grafana fills in what the interval is."""
    return promql.parse(expression.replace("$__rate_interval", "1m"))


@pytest.mark.parametrize("expression", expressions())
def test_every_expression_asks_for_what_there_is(expression: str) -> None:
    known, found = samples(), [*asked(parsed(expression))]
    assert found
    assert all("job" in labels for _, labels in found), "a real vLLM has metrics of the same names"
    for name, labels in found:
        assert name in known
        assert labels <= known[name], name


def test_an_expression_can_be_wrong() -> None:
    [(name, labels)] = asked(
        parsed('sum by (modell) (rate(vllm:nothing_total{model_name="x"}[$__rate_interval]))')
    )
    assert name not in samples()
    assert labels == {"model_name", "modell"}
    with pytest.raises(ValueError):
        parsed("sum(rate(x[5m])")


def test_variables_of_the_dashboard_ask_for_what_there_is() -> None:
    board = json.loads(printed("--grafana"))
    asked_for = [
        one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"
    ]
    assert asked_for
    for query in asked_for:
        name, label = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert label in samples()[name]


def test_panels_do_not_overlap() -> None:
    board = json.loads(printed("--grafana"))
    taken = [
        (x, y)
        for panel in board["panels"]
        for at in (panel["gridPos"],)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(taken) == len(set(taken))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
