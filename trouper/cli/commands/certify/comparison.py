"""Two certificates side by side: what they were made on, each promise, and the ratio of each
figure."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from rich.table import Table

from trouper.cli.commands.certify.certificate import Json, promises_of, subject_of

WORDS = {True: "held", False: "broken", None: "measured", "": "-"}


@attrs.frozen
class CertificatePair:
    """An earlier certificate and a later one."""

    first: Json
    second: Json

    @property
    def newly_broken(self) -> list[str]:
        """Promises that held in the first and do not in the second, and sections that held in the
        first and failed in the second, or are broken there by a promise that the first, of another
        version, does not have."""
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
        """Sections that held in the first, and of which the second shows nothing: they ran out of
        time, were interrupted or left out."""
        return self._held_before("out of time", "interrupted", "not run", "")

    def _held_before(self, *statuses: str) -> list[str]:
        """Sections that held in the first, and have one of these statuses in the second; "": it
        does not have them."""
        after = {section["name"]: section["status"] for section in self.second["sections"]}
        held = [
            section["name"] for section in self.first["sections"] if section["status"] == "held"
        ]
        return [name for name in held if after.get(name, "") in statuses]

    def tables(self) -> Iterator[Table]:
        """Yield a table of what differs about the two, one of promises, and one of figures."""
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
        """Yield figures that both have."""
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
