"""A certificate's files: JSON, and HTML made from JSON."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from trouper.cli.terminal_text import data_shown
from trouper.protocol.paths import is_directory
from trouper_lab.certify.certificate import FORMAT, Json, line_of
from trouper_lab.reports import draw_bars, draw_lines, html_page, report_files


class PromiseShape(TypedDict):
    text: str
    held: bool | None


class SectionShape(TypedDict):
    name: str
    status: str
    promises: list[PromiseShape]
    figures: dict[str, float]


class ModelShape(TypedDict):
    name: Any


class SystemShape(TypedDict):
    system: Any
    machine: Any


class CertificateShape(TypedDict):
    """The entries that a comparison reads."""

    command: Any
    device: Json
    made: Any
    model: ModelShape
    sections: list[SectionShape]
    system: SystemShape
    versions: Json


class NoCertificate(Exception):
    """The message names the file."""


def require_writable(out: Path) -> None:
    """Raises `NoCertificate`."""
    parent = out.absolute().parent
    if not out.name or not is_directory(parent):
        raise NoCertificate(f"{out}: there is no directory {parent}")
    if directories := [path for path in report_files(out) if is_directory(path)]:
        raise NoCertificate(f"{directories[0]} is a directory")
    try:
        with tempfile.NamedTemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise NoCertificate(
            f"{parent} cannot be written to ({error.strerror}); name another one, as in --out "
            "~/certificate"
        ) from error


def write_certificate(certificate: Json, out: Path) -> list[Path]:
    """Write both files atomically. Raises `NoCertificate`."""
    texts = (json.dumps(certificate, indent=1) + "\n", as_html(certificate))
    written = report_files(out)
    for path, text in zip(written, texts, strict=True):
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise NoCertificate(f"{path} cannot be written: {error.strerror}") from error
    return written


def read_certificate(path: Path) -> Json:
    """Raises `NoCertificate`."""
    try:
        content: Any = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise NoCertificate(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise NoCertificate(
            f"{path} is no JSON ({error}); give the .json that trouper certify wrote"
        ) from error
    name = content.get("format") if isinstance(content, dict) else None
    if not isinstance(name, str) or name.partition("/")[0] != FORMAT.partition("/")[0]:
        raise NoCertificate(f"{path} is no certificate; give the .json that trouper certify wrote")
    if name != FORMAT:
        raise NoCertificate(
            f"{path} has the format {name}, which another version of trouper wrote; this one reads "
            f"{FORMAT}: make it again"
        )
    try:
        msgspec.convert(content, CertificateShape)
    except msgspec.ValidationError as error:
        raise NoCertificate(
            f"{path} is not complete, or was changed: make it again by trouper certify"
        ) from error
    return dict(data_shown(content))


MARKS = {True: "held", False: "BROKEN", None: "measured"}
STYLE = """<style>
.held { color: var(--c2); } .BROKEN, .broken, .failed, .out-of-time, .interrupted {
  color: var(--c1); font-weight: 600; } .measured { color: var(--faint); }
section { margin: 2.5rem 0; } td.text, th.text { text-align: left; white-space: normal; } pre {
  overflow-x: auto; color: var(--faint); }
</style>"""


def as_html(certificate: Json) -> str:
    """The page, which fetches nothing."""
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
<pre tabindex="0">{commands}</pre></section>"""
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
    head = '<tr><th class="text">promise</th><th>held</th><th class="text">measured</th></tr>'
    parts = [
        f"<h2>{escape(section['title'])}</h2>",
        f'<p class="{section["status"].replace(" ", "-")}">{_status(section)}</p>',
    ]
    if promises:
        table = f"<table><thead>{head}</thead><tbody>{promises}</tbody></table>"
        parts.append(f'<div class="wide" tabindex="0">{table}</div>')
    parts += [f"<p>{escape(note)}</p>" for note in section["notes"]]
    parts += map(_table, section["tables"])
    figures = "\n".join(map(_plot, section["plots"]))
    parts += [f'<div class="plots">{figures}</div>'] if figures else []
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
    return f'<div class="wide" tabindex="0">{body}</div>'


def _plot(drawn: Json) -> str:
    if drawn["kind"] == "bars":
        return draw_bars(drawn["title"], drawn["values"], drawn["y"])
    series = {name: [(x, y) for x, y in points] for name, points in drawn["series"].items()}
    return draw_lines(drawn["title"], series, drawn["x"], drawn["y"])
