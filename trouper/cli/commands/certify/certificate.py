"""What a certificate holds: sections, their promises, and the figures that were measured. It is
JSON; the page is made from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import attrs

FORMAT = "trouper-certificate/1"
Status = Literal["held", "broken", "failed", "out of time", "interrupted", "not run"]
"""out of time: a part was not reached in the section's time, which `problem` names. interrupted:
the user ended it. not run: there is nothing to measure for this model."""
UNFINISHED: dict[str, str] = {
    "failed": "could not be run to the end",
    "out of time": "ran out of time",
    "interrupted": "was interrupted",
}
"""Statuses of sections that do not show what they are about."""
Json = dict[str, Any]


@attrs.frozen
class PromiseResult:
    """One promise of the documentation, and what was found. held: None where nothing is promised,
    and only measured."""

    text: str
    held: bool | None
    measured: str


@attrs.define
class SectionResult:
    """One section of a certificate. figures: numbers by name, with the unit at the name's end.
    plots: arguments of the drawing functions."""

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
    """Yield each promise with the name of its section."""
    for section in certificate["sections"]:
        for promise in section["promises"]:
            yield section["name"], promise


def held(certificate: Json) -> bool:
    """Whether every section that was chosen ran, and every promise of them held."""
    return all(
        section["status"] != "broken" and section["status"] not in UNFINISHED
        for section in certificate["sections"]
    )


def subject_of(certificate: Json) -> str:
    """Name the device and the model in a few words."""
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
    """Sum up a certificate in one plain line."""
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
    """Names of sections that do not show what they are about, by status."""
    found: dict[str, list[str]] = {}
    for section in certificate["sections"]:
        if section["status"] in UNFINISHED:
            found.setdefault(section["status"], []).append(section["name"])
    return found
