"""A certificate: sections, promises and figures, as in the JSON file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
from rich.table import Table

FORMAT = "trouper-certificate/1"
Status = Literal["held", "broken", "failed", "out of time", "interrupted", "not run"]
"""out of time: `problem` names a missed part. not run: nothing to measure."""
UNFINISHED: dict[str, str] = {
    "failed": "could not be run to the end",
    "out of time": "ran out of time",
    "interrupted": "was interrupted",
}
"""Statuses without a verdict."""
Json = dict[str, Any]


@attrs.frozen
class PromiseResult:
    """held: None without a promise."""

    text: str
    held: bool | None
    measured: str


@attrs.define
class SectionResult:
    """figures: names end with units. plots: arguments of drawing functions."""

    name: str
    title: str
    status: Status = "not run"
    problem: str = ""
    seconds: float = 0.0
    promises: list[PromiseResult] = attrs.field(factory=list)
    figures: dict[str, float] = attrs.field(factory=dict)
    tables: list[Json] = attrs.field(factory=list)
    plots: list[Json] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)

    def promise(self, text: str, held: bool | None, measured: str) -> None:
        self.promises.append(PromiseResult(text, held, measured))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        self.tables.append(
            {"columns": list(columns), "rows": [[str(cell) for cell in row] for row in rows]}
        )

    def bars(self, title: str, values: dict[str, float], unit: str) -> None:
        self.plots.append({"kind": "bars", "title": title, "values": values, "y": unit})

    def lines(
        self, title: str, series: dict[str, list[tuple[float, float]]], x: str, y: str
    ) -> None:
        self.plots.append({"kind": "lines", "title": title, "series": series, "x": x, "y": y})


def promises_of(certificate: Json) -> Iterator[tuple[str, Json]]:
    """(section name, promise)."""
    for section in certificate["sections"]:
        for promise in section["promises"]:
            yield section["name"], promise


def held(certificate: Json) -> bool:
    """Whether every chosen section ran and held."""
    return all(
        section["status"] != "broken" and section["status"] not in UNFINISHED
        for section in certificate["sections"]
    )


def subject_of(certificate: Json) -> str:
    device, model, system = certificate["device"], certificate["model"], certificate["system"]
    computes = model.get("arithmetic", "")
    stored = model.get("stored", "")
    weights = (
        stored
        if stored == computes
        else ", computed as ".join(part for part in (stored, computes) if part)
    )
    name = f"{device.get('name', 'unknown device')} ({device.get('computes_on', '?')})"
    return (
        f"{system['system']} {system['machine']}, {name}, {model['name']} "
        f"({weights or 'not loaded'})"
    )


def line_of(certificate: Json) -> str:
    checked = [promise for _, promise in promises_of(certificate) if promise["held"] is not None]
    broken = [
        f"{name}: {promise['text']}"
        for name, promise in promises_of(certificate)
        if promise["held"] is False
    ]
    unfinished = unfinished_of(certificate)
    where = subject_of(certificate)
    if not broken and not unfinished:
        return (
            f"{'all ' if len(checked) > 1 else ''}{_promises(len(checked))} held on {where}"
            if checked
            else f"measured, with nothing to be held, on {where}"
        )
    were = "was" if len(broken) == 1 else "were"
    parts = (
        [f"{len(broken)} of {_promises(len(checked))} {were} broken ({'; '.join(broken)})"]
        if broken
        else []
    )
    parts += [f"{', '.join(names)} {UNFINISHED[status]}" for status, names in unfinished.items()]
    rest = f"; {_promises(len(checked))} held" if checked and not broken else ""
    return f"{' and '.join(parts)} on {where}{rest}"


def _promises(count: int) -> str:
    return "1 promise" if count == 1 else f"{count} promises"


def unfinished_of(certificate: Json) -> dict[str, list[str]]:
    """Section names by status, without verdicts."""
    found: dict[str, list[str]] = {}
    for section in certificate["sections"]:
        if section["status"] in UNFINISHED:
            found.setdefault(section["status"], []).append(section["name"])
    return found


PART = r"/[^\s/\\:;,'\"`()<>\[\]{}]+"
PATH = re.compile(rf"(?<![\w.:/-])(?:~(?:{PART})+|(?:{PART}){{2,}})")
"""An absolute path, or below a home directory; neither /health nor a URL."""


def without_directories(certificate: Json, names: Mapping[str, str]) -> Json:
    """Cut absolute paths, which errors quote, to last parts. `names`: replacements."""
    known = {path: name for path, name in names.items() if path.startswith("/") and path != "/"}
    changed: Json = _changed(
        certificate, dict(sorted(known.items(), key=lambda item: -len(item[0])))
    )
    return changed


def _changed(value: Any, names: Mapping[str, str]) -> Any:
    match value:
        case str():
            for path, name in names.items():
                value = value.replace(path, name)
            return PATH.sub(lambda found: Path(found[0]).name, value)
        case dict():
            return {key: _changed(each, names) for key, each in value.items()}
        case list() | tuple():
            return [_changed(each, names) for each in value]
        case _:
            return value


WORDS = {True: "held", False: "broken", None: "measured", "": "-"}


@attrs.frozen
class CertificatePair:
    first: Json
    second: Json

    @property
    def newly_broken(self) -> list[str]:
        """Promises that broke, and sections that held and now fail or break a new promise."""
        before, after = (
            {key: promise["held"] for key, promise in _keyed(each)}
            for each in (self.first, self.second)
        )
        broken = [key for key, held in after.items() if held is False and before.get(key) is True]
        sections = self._held_before("broken", "failed")
        named = {section for section, _ in broken}
        return [f"{name}: {text}" for name, text in broken] + [
            name for name in sections if name not in named
        ]

    @property
    def not_shown(self) -> list[str]:
        """Sections that held before and are now unfinished or absent."""
        return self._held_before("out of time", "interrupted", "not run", "")

    def _held_before(self, *statuses: str) -> list[str]:
        """Sections with one of these statuses that held before; "": absent."""
        after = {section["name"]: section["status"] for section in self.second["sections"]}
        held = [
            section["name"] for section in self.first["sections"] if section["status"] == "held"
        ]
        return [name for name in held if after.get(name, "") in statuses]

    def tables(self) -> Iterator[Table]:
        about = Table("", "first", "second", box=None, header_style="bold", pad_edge=False)
        for name, *pair in self._about():
            about.add_row(name, *pair)
        yield about
        promises = Table(
            "promise", "first", "second", box=None, header_style="bold", pad_edge=False
        )
        before, after = (dict(_keyed(each)) for each in (self.first, self.second))
        for key in dict.fromkeys([*before, *after]):
            promises.add_row(
                ": ".join(key),
                *(WORDS[known.get(key, {"held": ""})["held"]] for known in (before, after)),
            )
        yield promises
        figures = Table("figure", box=None, header_style="bold", pad_edge=False)
        for column in ("first", "second", "second / first"):
            figures.add_column(column, justify="right")
        for name, one, other in self._figures():
            ratio = f"{other / one:.2f}" if one else ""
            figures.add_row(name, f"{one:,.6g}", f"{other:,.6g}", ratio)
        yield figures

    def _about(self) -> Iterator[tuple[str, str, str]]:
        yield "on", subject_of(self.first), subject_of(self.second)
        yield "made", self.first["made"], self.second["made"]
        for name in dict.fromkeys([*self.first["versions"], *self.second["versions"]]):
            one, other = (
                self.first["versions"].get(name, "-"),
                self.second["versions"].get(name, "-"),
            )
            if one != other:
                yield name, one, other

    def _figures(self) -> Iterator[tuple[str, float, float]]:
        known = [
            {
                f"{s['name']}.{name}": value
                for s in each["sections"]
                for name, value in s["figures"].items()
            }
            for each in (self.first, self.second)
        ]
        for name, value in known[0].items():
            if name in known[1]:
                yield name, value, known[1][name]


def _keyed(certificate: Json) -> Iterator[tuple[tuple[str, str], Json]]:
    for name, promise in promises_of(certificate):
        yield (name, promise["text"]), promise
