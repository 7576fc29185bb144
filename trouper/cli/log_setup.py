"""Format of the log, which a thread writes: a paused terminal would block the event loop."""

from __future__ import annotations

import copy
import io
import json
import logging
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from queue import Full, Queue
from typing import IO, Any, Literal, TextIO, cast

from rich.console import Console
from rich.logging import RichHandler

from trouper.cli.terminal_text import BREAKS
from trouper.protocol.logs import CURRENT_REQUEST, FIELDS, REQUEST_ID

LINES = 10_000  # More records are dropped, and counted.
FLUSH_TIMEOUT_S = 1.0  # Time at the end of the process
Write = Callable[[logging.LogRecord], None]


def unbuffer_stderr() -> None:
    # Python flushes a buffer at exit, and would wait for a thread that holds the lock.
    try:
        raw = io.FileIO(sys.stderr.fileno(), "w", closefd=False)
    except (
        OSError,
        ValueError,
        AttributeError,
    ):
        # Closed, absent (None), or an object of the caller's.
        return
    sys.stderr = io.TextIOWrapper(
        cast("IO[bytes]", raw),
        sys.stderr.encoding,
        "backslashreplace",
        line_buffering=True,
        write_through=True,
    )


class LineWriter:
    def __init__(self, formatter: logging.Formatter, stream: TextIO | None = None) -> None:
        self._formatter, self._stream = formatter, stream or sys.stderr

    def __call__(self, record: logging.LogRecord) -> None:
        self._stream.write(f"{self._formatter.format(record)}\n")
        self._stream.flush()


class BackgroundHandler(logging.Handler):
    """Queues records for a thread."""

    def __init__(self, write: Write, lines: int = LINES) -> None:
        super().__init__()
        self._write = write
        self._records: Queue[logging.LogRecord] = Queue(lines)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="trouper log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._dropped:
                self._records.put_nowait(_dropped(self._dropped))
                self._dropped = 0
            self._records.put_nowait(_settled(record))
        except Full:
            self._dropped += 1
        except Exception:  # noqa: BLE001 - as every handler of the standard library has it
            self.handleError(record)

    def _run(self) -> None:
        while True:
            record = self._records.get()
            try:
                self._write(record)
            except (OSError, ValueError):
                pass  # The reader has ended, or the stream was closed.
            except Exception:  # noqa: BLE001 - as above
                self.handleError(record)
            self._records.task_done()

    def flush(self) -> None:
        """Wait until all records are written, at most FLUSH_TIMEOUT_S."""
        with self._records.all_tasks_done:
            self._records.all_tasks_done.wait_for(
                lambda: not self._records.unfinished_tasks, FLUSH_TIMEOUT_S
            )


def _settled(record: logging.LogRecord) -> logging.LogRecord:
    # Arguments may change before the write.
    settled = copy.copy(record)
    settled.msg, settled.args = record.getMessage(), None
    return settled


def _dropped(lines: int) -> logging.LogRecord:
    message = f"{lines} lines of the log were dropped: nobody read them"
    parts = {
        "name": "trouper",
        "levelno": logging.WARNING,
        "levelname": "WARNING",
        "msg": message,
        "about": "",
    }
    return logging.makeLogRecord({**parts, FIELDS: {"dropped": lines}})


LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "human", "json")
Format = Literal["auto", "human", "json"]


def configure_logging(level: str, console: Console, form: Format) -> None:
    """Log in colours on a terminal, elsewhere as JSON lines, unless plain lines are requested."""
    unbuffer_stderr()
    write: Write
    if form == "json" or (form == "auto" and not console.is_terminal):
        write = LineWriter(JsonLines())
    elif console.is_terminal:
        rich = RichHandler(console=console, show_path=False, rich_tracebacks=True)
        rich.setFormatter(OneLine("%(message)s%(about)s"))
        write = rich.emit
    else:
        write = LineWriter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s%(about)s"))
    handler = BackgroundHandler(write)
    handler.addFilter(name_request)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("trouper").setLevel(level.upper())


def name_request(record: logging.LogRecord) -> bool:
    named = getattr(record, REQUEST_ID, "") or CURRENT_REQUEST.get()
    setattr(record, REQUEST_ID, named)
    record.about = f" [{named}]" if named else ""
    return True


class OneLine(logging.Formatter):
    """Formats a record for a person. No word of a client begins a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as the base class.
        return BREAKS.sub(lambda found: repr(found[0])[1:-1], super().formatMessage(record))


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if named := getattr(record, REQUEST_ID, ""):
            entry[REQUEST_ID] = named
        entry |= cast("dict[str, Any]", getattr(record, FIELDS, {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)
