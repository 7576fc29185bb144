"""Runs a measurement of the engine in a process of its own (`trouper.engine.certificate`), and
reads its rows."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from trouper.cli.commands.certify.certificate import Json
from trouper.cli.commands.certify.child_processes import ChildProcesses, last_words


class ProgramFailed(Exception):
    """The process ended with an error. The message is the last line that it wrote."""


class CutShort(Exception):
    """The time of the program has passed. Rows before that are known."""


def program_rows(
    children: ChildProcesses,
    name: str,
    given: Mapping[str, Any],
    limit_s: float,
    **environment: str,
) -> Iterator[Json]:
    """Yield rows as they come. Raises `CutShort` after `limit_s` seconds, `ProgramFailed`, and
    `SectionStopped`."""
    command = [sys.executable, "-P", "-m", "trouper.engine.certificate", name, json.dumps(given)]
    with tempfile.TemporaryFile() as errors:
        process = children.start(command, environment, stdout=subprocess.PIPE, stderr=errors)
        cut = threading.Event()

        def cut_short() -> None:
            cut.set()
            process.kill()

        timer = threading.Timer(max(limit_s, 1.0), cut_short)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
            children.ended(process)
            assert process.stdout is not None
            process.stdout.close()
        children.check()
        if cut.is_set():
            raise CutShort
        if code:
            errors.seek(0)
            raise ProgramFailed(last_words(errors.read().decode(errors="replace"), code))
