"""The figures of a run: as a table for the terminal, as JSON, and as one HTML file without external
resources."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import attrs
from rich.table import Table

from trouper.cli.commands.bench import plot
from trouper.cli.commands.bench.figures import LoadFigures, PrefixFigures
from trouper.cli.html_page import html_page

COLUMNS = (
    "streams",
    "tok/s",
    "decode tok/s",
    "tok/s a stream",
    "TTFT p50",
    "p95",
    "gap p50",
    "p99",
    "longest",
)


@attrs.frozen(kw_only=True)
class Report:
    about: dict[str, str]
    """What was measured, where and when."""
    loads: Sequence[LoadFigures]
    prefix: PrefixFigures | None


def as_json(report: Report) -> str:
    return json.dumps(attrs.asdict(report), indent=1)


def as_table(report: Report) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for load in report.loads:
        table.add_row(*cells(load))
    return table


def cells(load: LoadFigures) -> tuple[str, ...]:
    rates = (load.tokens_per_s, load.decode_tokens_per_s, load.per_stream_tokens_per_s)
    times = (
        load.ttft_s.get(50),
        load.ttft_s.get(95),
        load.gap_s.get(50),
        load.gap_s.get(99),
        load.gap_s.get(100),
    )
    return (str(load.streams), *(f"{rate:,.1f}" for rate in rates), *map(seconds, times))


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def prefix_line(prefix: PrefixFigures) -> str:
    return (
        f"a prompt of {prefix.prompt_tokens} tokens, to its first token: {seconds(prefix.cold_s)} "
        f"new, {seconds(prefix.again_s)} "
        f"again ({prefix.cached_tokens} tokens cached), {seconds(prefix.extended_s)} with another "
        "question behind it; "
        f"{seconds(prefix.short_s)} for a prompt of a few tokens"
    )


def as_html(report: Report) -> str:
    about = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in report.about.items()
    )
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells(load))}</tr>"
        for load in report.loads
    )
    below = f"<p>{escape(prefix_line(report.prefix))}</p>" if report.prefix else ""
    figures = "\n".join(_figures(report))
    body = f"""<dl>{about}</dl>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>
{below}
<main>
{figures}
</main>"""
    return html_page("trouper bench", body)


def _figures(report: Report) -> Iterator[str]:
    loads = report.loads
    rates: dict[str, list[tuple[float, float]]] = {
        "all streams, prefill included": [(load.streams, load.tokens_per_s) for load in loads],
        "while all decode": [
            (load.streams, load.decode_tokens_per_s) for load in loads if load.decode_tokens_per_s
        ],
        "one stream of them": [(load.streams, load.per_stream_tokens_per_s) for load in loads],
    }
    yield plot.lines("Throughput", rates, "streams", "tokens/s", doubling=True)
    firsts = {
        f"p{p}": [(load.streams, load.ttft_s[p]) for load in loads if load.ttft_s]
        for p in (50, 95, 100)
    }
    yield plot.lines("Time to the first token", firsts, "streams", "seconds", doubling=True)
    gaps = {
        f"{load.streams} stream{'s' * (load.streams > 1)}": [
            (percent, 1000 * gap) for percent, gap in load.gap_s.items()
        ]
        for load in loads
        if load.gap_s
    }
    yield plot.lines("Pauses between tokens of a stream", gaps, "percentile", "milliseconds")
    if report.prefix:
        prefix = report.prefix
        found: dict[str, Any] = {
            "new": prefix.cold_s,
            "again": prefix.again_s,
            "extended": prefix.extended_s,
            "a few tokens": prefix.short_s,
        }
        yield plot.bars(f"First token of {prefix.prompt_tokens} tokens", found, "seconds")
