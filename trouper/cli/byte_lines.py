"""Progress of a download as lines: bytes done, and in all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from huggingface_hub.utils import tqdm

BYTES = "huggingface_hub.snapshot_download"
"""Name of the hub's bar for the bytes of all files. Others count files, or the network's bytes."""


def byte_lines() -> type[tqdm]:
    """Return a bar that prints lines. The hub is imported only here: it is slow to import."""
    from huggingface_hub.utils import tqdm

    class ByteLines(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **options: Any) -> None:
            self._prints = options.get("name") == BYTES
            self._done = 0.0
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            self._done += n or 0
            if self._prints:
                click.echo(f"{self._done:.0f} {self.total or 0:.0f}")

    return ByteLines
