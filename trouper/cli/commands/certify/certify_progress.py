"""Progress of `trouper certify` on a terminal: a bar for all sections, and one for the section that
runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


@attrs.define(eq=False)
class CertifyProgress:
    """Bars, or a line for each section where there is no terminal."""

    console: Console
    bars: Progress
    sections: Sequence[str]
    total: TaskID
    current: TaskID
    begun: set[str] = attrs.field(factory=set)

    def show(self, name: str, part: float, text: str) -> None:
        """Show a section, the part of it that is done (0 to 1), and what comes next."""
        done = self.sections.index(name) if name in self.sections else 0
        self.bars.update(self.total, completed=done + part)
        self.bars.update(
            self.current, completed=part, description=f"{name}: {text}" if text else name
        )
        if not self.console.is_terminal and name not in self.begun:
            self.begun.add(name)
            self.console.print(f"{name}: {text}")


@contextmanager
def progress_shown(sections: Sequence[str]) -> Iterator[CertifyProgress]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        total = bars.add_task("certificate", total=len(sections))
        yield CertifyProgress(console, bars, sections, total, bars.add_task("", total=1.0))
