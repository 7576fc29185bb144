"""The figures of a run: as a table for the terminal, as JSON, and as one HTML file without external resources."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import attrs
from rich.table import Table

from trouper.cli.commands.bench import plot
from trouper.cli.commands.bench.figures import LoadFigures, PrefixFigures

COLUMNS = ("streams", "tok/s", "decode tok/s", "tok/s a stream", "TTFT p50", "p95", "gap p50", "p99", "longest")


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
    times = (load.ttft_s.get(50), load.ttft_s.get(95), load.gap_s.get(50), load.gap_s.get(99), load.gap_s.get(100))
    return (str(load.streams), *(f"{rate:,.1f}" for rate in rates), *map(seconds, times))


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def prefix_line(prefix: PrefixFigures) -> str:
    return (
        f"a prompt of {prefix.prompt_tokens} tokens, to its first token: {seconds(prefix.cold_s)} new, {seconds(prefix.again_s)} "
        f"again ({prefix.cached_tokens} tokens cached), {seconds(prefix.extended_s)} with another question behind it; "
        f"{seconds(prefix.short_s)} for a prompt of a few tokens"
    )


def as_html(report: Report) -> str:
    about = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in report.about.items())
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells(load))}</tr>" for load in report.loads)
    below = f"<p>{escape(prefix_line(report.prefix))}</p>" if report.prefix else ""
    figures = "\n".join(_figures(report))
    return PAGE.format(about=about, head=head, rows=rows, below=below, figures=figures)


def _figures(report: Report) -> Iterator[str]:
    loads = report.loads
    rates: dict[str, list[tuple[float, float]]] = {
        "all streams, prefill included": [(load.streams, load.tokens_per_s) for load in loads],
        "while all decode": [(load.streams, load.decode_tokens_per_s) for load in loads if load.decode_tokens_per_s],
        "one stream of them": [(load.streams, load.per_stream_tokens_per_s) for load in loads],
    }
    yield plot.lines("Throughput", rates, "streams", "tokens/s", doubling=True)
    firsts = {f"p{p}": [(load.streams, load.ttft_s[p]) for load in loads if load.ttft_s] for p in (50, 95, 100)}
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


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>trouper bench</title>
<style>
:root {{ color-scheme: light dark; --ink: #1c2128; --faint: #57606a; --paper: #ffffff; --grid: #d8dee4;
  --c0: #0969da; --c1: #bc4c00; --c2: #1a7f37; --c3: #8250df; --c4: #9a6700; --c5: #bf3989; --c6: #1b7c83; --c7: #57606a; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6edf3; --faint: #9198a1; --paper: #0d1117; --grid: #30363d;
  --c0: #58a6ff; --c1: #f0883e; --c2: #56d364; --c3: #bc8cff; --c4: #e3b341; --c5: #f778ba; --c6: #56d4dd; --c7: #9198a1; }} }}
body {{ margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }} dt {{ color: var(--faint); }} dd {{ margin: 0; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1.5rem; }}
figure {{ margin: 0; }} figcaption {{ font-weight: 600; }}
svg {{ width: 100%; height: auto; }} svg text {{ fill: var(--faint); font-size: 12px; }}
ul {{ display: flex; flex-wrap: wrap; gap: 0 1rem; margin: 0; padding: 0; list-style: none; color: var(--faint); }}
li span {{ display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }}
</style>
</head>
<body>
<h1>trouper bench</h1>
<dl>{about}</dl>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>
{below}
<main>
{figures}
</main>
</body>
</html>
"""
