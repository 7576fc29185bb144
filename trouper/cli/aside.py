"""Log lines that are written on a thread of their own: whoever does not read them holds nobody up.

stderr may be a pipe. When its reader stands still the pipe is full after 64 KiB, and a write waits for as long as that lasts;
on the event loop the whole server would wait with it.
"""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import suppress
from queue import Full, Queue
from typing import TextIO

LINES = 10_000
"""That may wait to be written. More are dropped, and counted."""
LAST_WORDS_S = 1.0
"""At the end, for what waits."""


class AsideHandler(logging.Handler):
    """Formats where the record is made; writes elsewhere, in order."""

    def __init__(self, stream: TextIO | None = None, lines: int = LINES) -> None:
        super().__init__()
        self._stream = stream or sys.stderr
        self._lines: Queue[str] = Queue(lines)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="trouper log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            missed = f"({self._dropped} lines of the log were dropped: nobody read them)\n" if self._dropped else ""
            self._lines.put_nowait(f"{missed}{self.format(record)}\n")
            self._dropped = 0
        except Full:
            self._dropped += 1
        except Exception:  # noqa: BLE001 - as every handler of the standard library has it
            self.handleError(record)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            with suppress(OSError, ValueError):  # The reader is gone, or the stream was closed.
                self._stream.write(line)
                self._stream.flush()
            self._lines.task_done()

    def flush(self) -> None:
        """Wait until all is written, but not for a reader that stands still. `logging.shutdown` calls this at the end."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, LAST_WORDS_S)
