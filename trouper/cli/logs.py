"""Logging: the library logs to `trouper`, and the program that runs it says where that goes."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.logging import RichHandler

LEVELS = ("debug", "info", "warning", "error")


def configure_logging(level: str, console: Console) -> None:
    """Colours for a person, one plain line a record for a file."""
    handler: logging.Handler = logging.StreamHandler()
    layout = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    if console.is_terminal:
        handler, layout = RichHandler(console=console, show_path=False, rich_tracebacks=True), "%(message)s"
    handler.setFormatter(logging.Formatter(layout))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("trouper").setLevel(level.upper())
