"""What a terminal shows while a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TransferSpeedColumn

from trouper.protocol.loading import Loading, LoadWatch


@contextmanager
def shown(console: Console) -> Iterator[LoadWatch]:
    """A bar for each stage, beside the log. Nothing where nobody looks: the log says the same in lines. Nothing before
    the first stage either, since the model hub shows bars of its own. What is loaded later is not shown."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    tasks: dict[str, TaskID] = {}
    over = False

    def watch(loading: Loading) -> None:
        if over:
            return
        progress.start()
        if loading.stage not in tasks:
            tasks[loading.stage] = progress.add_task(f"{loading.model}: {loading.stage}", total=loading.total_bytes)
        progress.update(tasks[loading.stage], completed=loading.done_bytes)

    try:
        yield watch
    finally:
        over = True
        progress.stop()
