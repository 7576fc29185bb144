"""The soak as one HTML page: the verdict, a table of slopes, and a plot for each series."""

from __future__ import annotations

from collections import defaultdict
from html import escape

from tests.soak.judging import Judged, Report
from tests.soak.load import Tally
from trouper_lab.reports import Series, draw_lines, html_page


def page(report: Report, tally: Tally, facts: dict[str, str]) -> str:
    """`facts`: what the run was, as terms and their descriptions."""
    verdict = "FAILED" if report.failed else "held"
    terms = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items()
    )
    counts = ", ".join(f"{number} {what}" for what, number in tally.asked.most_common())
    parts = [
        (
            f"<dl>{terms}<dt>answers</dt><dd>{tally.checked} compared, {len(tally.wrong)} wrong, "
            f"{len(tally.errors)} errors</dd>"
        ),
        f"<dt>asked</dt><dd>{escape(counts)}</dd></dl>",
        _faults(report),
        (
            '<div class="wide"><table><tr><th>series<th>level<th>slope an '
            f"hour<th>low<th>high<th>verdict</tr>{_rows(report)}</table></div>"
        ),
        f'<div class="plots">{_plots(report)}</div>',
    ]
    return html_page(f"Soak: {verdict}", "\n".join(parts))


def _faults(report: Report) -> str:
    return "".join(f"<p><b>{escape(fault)}</b></p>" for fault in report.faults[:50])


def _rows(report: Report) -> str:
    return "\n".join(map(_row, report.judged))


def _row(series: Judged) -> str:
    slope = series.slope
    figures = "".join(f"<td>{figure:+.3g}" for figure in (slope.value, slope.low, slope.high))
    mark = f"<b>{series.verdict}</b>" if series.failed else series.verdict
    not_judged = "" if series.kind.bad else " (not judged)"
    return (
        f"<tr><td>{escape(series.name)}<td>{slope.level:.4g} "
        f"{series.kind.unit}{figures}<td>{mark}{not_judged}</tr>"
    )


def _plots(report: Report) -> str:
    """One for each field, with a line for each process."""
    plots: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(dict)
    units = {}
    for series in report.judged:
        group, _, field = series.name.rpartition(".")
        title = field.split(" of rank")[0] if group else series.name
        if series.points:
            plots[title][series.name] = series.points
            units[title] = series.kind.unit
    return "\n".join(_plot(title, named, units[title]) for title, named in plots.items())


def _plot(title: str, named: Series, unit: str) -> str:
    return draw_lines(title, named, "hours", unit)
