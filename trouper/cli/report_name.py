"""--out of commands that write a report as two files, NAME.json and NAME.html."""

from __future__ import annotations

import os
from pathlib import Path

import click

from trouper.protocol.paths import is_directory

SUFFIXES = (".json", ".html")


class ReportName(click.ParamType[Path]):
    """A path without suffix. For a directory, the command's own name in it; a suffix that the
    command appends itself is taken off."""

    name = "path"

    def __init__(self, default: str) -> None:
        self._default = default

    def convert(
        self, value: object, param: click.Parameter | None, context: click.Context | None
    ) -> Path:
        if not str(value):
            self.fail("it is empty; give a name, or leave the flag out", param, context)
        path = Path(str(value))
        if str(value).endswith(os.sep) or is_directory(path):
            return path / self._default
        return path.with_suffix("") if path.suffix in SUFFIXES else path
