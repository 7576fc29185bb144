"""Progress bars on a terminal while a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

from trouper.protocol.loading import Loading, LoadWatch

WIDE = 100
"""Columns from which on the speed is shown"""
FIXED_WIDTH = len("- " + " ━━━━━━━━━━" + " 100.0/999.9 GB")
"""Columns beside the description"""
SPEED = len(" 100.0 MB/s")


@contextmanager
def shown(console: Console) -> Iterator[LoadWatch]:
    """Show a bar for each stage, on a terminal. Before the first, the model hub has bars."""
    progress = Progress(
        *_columns(console.width), console=console, transient=True, disable=not console.is_terminal
    )
    tasks: dict[str, TaskID] = {}
    over = False

    def watch(loading: Loading) -> None:
        if over:
            return
        progress.start()
        if loading.stage not in tasks:
            tasks[loading.stage] = progress.add_task(
                f"{_short(loading.model)}: {loading.stage}",
                total=loading.total_bytes,
                unit=loading.unit,
            )
        progress.update(tasks[loading.stage], completed=loading.done_bytes)

    try:
        yield watch
    finally:
        over = True
        progress.stop()


def _short(model: str) -> str:
    return PurePath(model).name or model


def _columns(width: int) -> Iterator[ProgressColumn]:
    """Return columns that fit one line; a long description is cut."""
    room = width - FIXED_WIDTH - (SPEED if width >= WIDE else 0)
    cut = Column(max_width=max(room, 1), no_wrap=True, overflow="ellipsis")
    yield SpinnerColumn()
    yield TextColumn("{task.description}", markup=False, table_column=cut)
    yield BarColumn(None)
    yield Done(table_column=Column(no_wrap=True))
    if width >= WIDE:
        yield Speed(table_column=Column(no_wrap=True))


class Done(DownloadColumn):
    def render(self, task: Task) -> Text:
        if task.fields.get("unit") != "steps":
            return super().render(task)
        return Text(f"{task.completed:.0f}/{task.total:.0f}", style="progress.download")


class Speed(TransferSpeedColumn):
    def render(self, task: Task) -> Text:
        return Text("") if task.fields.get("unit") == "steps" else super().render(task)
