"""`trouper serve`."""

from __future__ import annotations

from typing import Any

import click
import trio
from rich.console import Console

from trouper.cli.address import CannotListenError
from trouper.cli.exits import leaves, refuse
from trouper.cli.flags import flags_of, models_from, settings_from
from trouper.cli.logs import LEVELS, configure_logging
from trouper.protocol.errors import ModelUnusable, SettingsInvalid
from trouper.protocol.settings import ServerSettings, Settings


@click.command()
@flags_of(Settings)
@flags_of(ServerSettings)
@click.option("--log-level", type=click.Choice(LEVELS), default="info", envvar="TROUPER_LOG_LEVEL", show_default=True)
def serve(log_level: str, **given: Any) -> None:
    """Serve a model over HTTP, in OpenAI's dialect."""
    from trouper.cli.running import run  # Imports the whole server, which `trouper --help` does not need.

    console = Console(stderr=True)
    configure_logging(log_level, console)
    refused: list[str] = []
    try:
        settings, server_settings = models_from(given), settings_from(ServerSettings, given)
        trio.run(run, settings, server_settings, console)
    except* (ModelUnusable, SettingsInvalid, CannotListenError) as group:
        refused = [str(error) for error in leaves(group)]
    if refused:
        refuse(refused[0])
