"""`trouper bench`: measure this machine and model through HTTP."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import attrs
import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from trouper.cli.client import Where, client_of, first_model, read_as_trouper
from trouper.cli.exits import refuse
from trouper.cli.own_server import reach
from trouper.cli.streamed_answer import AnswerFailed
from trouper.protocol.paths import is_directory
from trouper_lab.load import (
    PATIENT,
    BenchOptions,
    LoadFigures,
    PrefixFigures,
    measure_load,
    measure_prefix,
)
from trouper_lab.reports import ReportName, draw_bars, draw_lines, html_page, report_files


class CountList(click.ParamType[tuple[int, ...]]):
    """Such as 1,2,4,8."""

    name = "counts"

    def convert(
        self, value: object, param: click.Parameter | None, context: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(sorted({int(part) for part in str(value).split(",")}))
        except ValueError:
            self.fail(f"{value!r} is no list of numbers, as in 1,2,4,8", param, context)
        if counts[0] < 1:
            self.fail("there is no load of fewer than one stream", param, context)
        return counts


@click.command
@client_of
@click.option(
    "--model",
    "own_model",
    metavar="DIR-OR-HUB-ID",
    help="Start a server with this model for this measurement alone.",
)
@click.option(
    "--streams",
    type=CountList(),
    default="1,2,4,8",
    show_default=True,
    help="How many at once, one after another.",
)
@click.option(
    "--tokens", type=click.IntRange(2), default=64, show_default=True, help="Of each answer."
)
@click.option(
    "--prompt-words", type=click.IntRange(1), default=50, show_default=True, help="Of each prompt."
)
@click.option(
    "--long-words",
    type=click.IntRange(0),
    default=500,
    show_default=True,
    help="Of the prompt for the cache; 0: none.",
)
@click.option(
    "--drafts",
    is_flag=True,
    help="Let answers be drafted. They repeat themselves more than text does.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Figures are medians of so many.",
)
@click.option(
    "--out",
    type=ReportName("trouper-bench"),
    default="trouper-bench",
    show_default=True,
    help="Writes this name with .json and .html; in a directory, trouper-bench.",
)
def bench(where: Where, /, *, own_model: str | None, out: Path, **options: Any) -> None:
    """Measure throughput, time to first token and pauses at several loads, and what the prefix
    cache spares.

    Every prompt is new, so nothing that was cached before helps.
    """
    _require_writable(out)
    with reach(where, own_model, *PATIENT) as server:
        try:
            _write(_measured(server, BenchOptions(**options)), out)
        except AnswerFailed as failed:
            refuse(f"{server.url}: {failed}")


def _require_writable(out: Path) -> None:
    """Refuse an unwritable --out early. Existing content stays."""
    if not out.name:
        refuse(f"--out {out}: names no file")
    if not is_directory(out.parent):
        refuse(f"--out {out}: there is no directory {out.parent}")
    for path in report_files(out):
        try:
            if path.is_symlink():  # A repository's link would have another file overwritten.
                remedy = "name what it leads to, or another file"
                refuse(f"--out {out}: {path} is a link to {path.readlink()}; {remedy}")
            is_new = not path.exists()
            path.open("ab").close()
            if is_new:
                path.unlink()
        except OSError as error:
            refuse(f"--out {out}: {path}: {error.strerror}")


def _measured(where: Where, options: BenchOptions) -> Report:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    about = _about(where, options)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=options.parts)

        def show_progress(what: str) -> None:
            progress.update(task, description=what, advance=1)

        loads = [measure_load(where, options, count, show_progress) for count in options.streams]
        prefix = measure_prefix(where, options, show_progress) if options.long_words else None
    return Report(about=about, loads=loads, prefix=prefix)


def _about(where: Where, options: BenchOptions) -> dict[str, str]:
    with where.client() as client:
        model = first_model(client)
        described = client.get("/openapi.json").raise_for_status()
        with read_as_trouper(client):
            version = described.json()["info"]["version"]
    return {
        "model": model,
        "server": f"trouper {version} at {where.url}",
        "client": (
            f"{platform.platform()}, {platform.machine()}, {os.cpu_count()} CPUs, Python "
            f"{platform.python_version()}"
        ),
        "load": (
            f"answers of {options.tokens} tokens to new prompts of {options.prompt_words} words, "
            f"{options.rounds} rounds, {'drafted' if options.drafts else 'no drafts'}"
        ),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _write(report: Report, out: Path) -> None:
    Console(width=None if sys.stdout.isatty() else 140).print(as_table(report))
    if report.prefix:
        click.echo(prefix_line(report.prefix))
    for path, text in zip(report_files(out), (as_json(report), as_html(report)), strict=True):
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            refuse(f"{path}: {error.strerror}")
        click.echo(f"written to {path}")


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
        f"new, {seconds(prefix.again_s)} again ({prefix.cached_tokens} tokens cached), "
        f"{seconds(prefix.extended_s)} with another question behind it; {seconds(prefix.short_s)} "
        "for a prompt of a few tokens"
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
<div class="wide" tabindex="0">
<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>
{below}
<div class="plots">
{figures}
</div>"""
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
    yield draw_lines("Throughput", rates, "streams", "tokens/s", doubling=True)
    firsts = {
        f"p{p}": [(load.streams, load.ttft_s[p]) for load in loads if load.ttft_s]
        for p in (50, 95, 100)
    }
    yield draw_lines("Time to the first token", firsts, "streams", "seconds", doubling=True)
    gaps = {
        f"{load.streams} stream{'s' * (load.streams > 1)}": [
            (percent, 1000 * gap) for percent, gap in load.gap_s.items()
        ]
        for load in loads
        if load.gap_s
    }
    yield draw_lines("Pauses between tokens of a stream", gaps, "percentile", "milliseconds")
    if report.prefix:
        prefix = report.prefix
        found: dict[str, Any] = {
            "new": prefix.cold_s,
            "again": prefix.again_s,
            "extended": prefix.extended_s,
            "a few tokens": prefix.short_s,
        }
        yield draw_bars(f"First token of {prefix.prompt_tokens} tokens", found, "seconds")
