"""Logging setup: the library logs to `trouper`, and the program that runs it decides where that
goes."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Literal, cast

from rich.console import Console
from rich.logging import RichHandler

from trouper.cli.background_log import BackgroundHandler, LineWriter, Write, unbuffer_stderr
from trouper.cli.terminal_text import BREAKS
from trouper.protocol.logs import CURRENT_REQUEST, FIELDS, REQUEST_ID

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "human", "json")
Format = Literal["auto", "human", "json"]


def configure_logging(level: str, console: Console, form: Format = "auto") -> None:
    """Log in colours on a terminal; elsewhere as a line of JSON for each record, unless plain lines
    are requested."""
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
    """Add the request's id to every record about a request, whichever logger made it."""
    named = getattr(record, REQUEST_ID, "") or CURRENT_REQUEST.get()
    setattr(record, REQUEST_ID, named)
    record.about = f" [{named}]" if named else ""
    return True


class OneLine(logging.Formatter):
    """Formats a record for a person. No word of a client begins a line of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as the base class.
        return BREAKS.sub(lambda found: repr(found[0])[1:-1], super().formatMessage(record))


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object on one line, whatever the text holds."""

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
