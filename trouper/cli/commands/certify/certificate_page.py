"""A certificate as one HTML page, made from its JSON alone."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from trouper.cli.commands.bench import plot
from trouper.cli.commands.certify.certificate import Json, line_of
from trouper.cli.html_page import html_page

MARKS = {True: "held", False: "BROKEN", None: "measured"}
STYLE = """<style>
.held { color: var(--c2); } .BROKEN, .broken, .failed, .out-of-time, .interrupted {
  color: var(--c1); font-weight: 600; } .measured { color: var(--faint); }
section { margin: 2.5rem 0; } td.text, th.text { text-align: left; white-space: normal; } pre {
  overflow-x: auto; color: var(--faint); }
</style>"""


def as_html(certificate: Json) -> str:
    """Draw the page. Nothing in it is fetched from anywhere."""
    about = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in _about(certificate)
    )
    sections = "\n".join(map(_section, certificate["sections"]))
    commands = escape("\n".join(certificate["commands"]))
    body = f"""{STYLE}
<p><strong>{escape(line_of(certificate))}</strong></p>
<dl>{about}</dl>
{sections}
<section><h2>Commands</h2>
<pre>{commands}</pre></section>"""
    return html_page("trouper certify", body)


def _about(certificate: Json) -> Iterator[tuple[str, str]]:
    device, model, system = certificate["device"], certificate["model"], certificate["system"]
    yield (
        "made",
        (
            f"{certificate['made']}, in {certificate['seconds']:.0f} s"
            f"{' (quick)' if certificate['quick'] else ''}"
        ),
    )
    yield "system", f"{system['platform']}, {system['cpus']} CPUs, Python {system['python']}"
    yield (
        "load of the machine",
        f"{system['load_before']} before, {system['load_after']} after (processes that want a CPU)",
    )
    if device:
        memory = device["memory_bytes"] / 1e9
        yield (
            "device",
            (
                f"{device['name']} {device['architecture']}, {device['computes_on']}, "
                f"{memory:.0f} GB, {device['float32_gflops']} float32 GFLOP/s"
            ),
        )
    yield (
        "versions",
        ", ".join(f"{name} {number}" for name, number in certificate["versions"].items()),
    )
    yield (
        "model",
        ", ".join(f"{name}: {value}" for name, value in model.items() if name != "lead_changes"),
    )
    changes = model.get("lead_changes", {})
    if changes:
        shown = ", ".join(
            f"{name}: {value if isinstance(value, str) else format(value, '.2g')}"
            for name, value in changes.items()
        )
        yield (
            "mlx-lm's own loop against itself",
            f"the lead of the best token changes by at most: {shown}",
        )


def _section(section: Json) -> str:
    promises = "".join(map(_promise, section["promises"]))
    head = '<tr><th class="text">promise</th><th></th><th class="text">measured</th></tr>'
    parts = [
        f"<h2>{escape(section['title'])}</h2>",
        f'<p class="{section["status"].replace(" ", "-")}">{_status(section)}</p>',
    ]
    if promises:
        parts.append(
            f'<div class="wide"><table><thead>{head}</thead><tbody>{promises}</tbody></table></div>'
        )
    parts += [f"<p>{escape(note)}</p>" for note in section["notes"]]
    parts += map(_table, section["tables"])
    figures = "\n".join(map(_plot, section["plots"]))
    parts += [f"<main>{figures}</main>"] if figures else []
    return f"<section>{''.join(parts)}</section>"


def _status(section: Json) -> str:
    reason = f": {section['problem']}" if section["problem"] else ""
    return escape(f"{section['status']}{reason}, {section['seconds']:.0f} s")


def _promise(promise: Json) -> str:
    mark = MARKS[promise["held"]]
    return (
        f'<tr><td class="text">{escape(promise["text"])}</td><td class="{mark}">{mark}</td>'
        f'<td class="text">{escape(promise["measured"])}</td></tr>'
    )


def _table(table: Json) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table["columns"])
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table["rows"]
    )
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="wide">{body}</div>'


def _plot(drawn: Json) -> str:
    if drawn["kind"] == "bars":
        return plot.bars(drawn["title"], drawn["values"], drawn["y"])
    series = {name: [(x, y) for x, y in points] for name, points in drawn["series"].items()}
    return plot.lines(drawn["title"], series, drawn["x"], drawn["y"])
