"""`trouper serve`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import click
import trio
from click.core import ParameterSource
from rich.console import Console

from trouper.cli.address import CannotListenError
from trouper.cli.exits import end_at_once, give_up, refuse
from trouper.cli.flag_groups import HELP_WIDTH, GroupedCommand
from trouper.cli.flags import MODELS, add_models, all_from, flags_of, misspelt
from trouper.cli.log_setup import FORMATS, LEVELS, Format, configure_logging
from trouper.cli.print_config import config_text
from trouper.cli.settings_file import configured, file_read, model_tables
from trouper.cli.trace_export import tracing
from trouper.cli.usage_errors import settings_error
from trouper.protocol.model_options import ModelOptions
from trouper.protocol.problems import ActorFailed, ModelUnusable, SettingsInvalid, leaves
from trouper.protocol.settings import ServerSettings, Settings, default_cache_dir
from trouper.system.lifeline import watch_launcher
from trouper.system.waking_time import WakingClock

logger = logging.getLogger("trouper")
NO_VARIABLE = "%s is no variable of trouper and has no effect; %s is one"


@click.command(cls=GroupedCommand, context_settings={"max_content_width": HELP_WIDTH})
@MODELS
@partial(configured, works_here=True)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print the settings that hold, as a settings file, and end.",
)
@flags_of(Settings)
@flags_of(ServerSettings)
@click.option(
    "--log-level",
    type=click.Choice(LEVELS),
    default="info",
    envvar="TROUPER_LOG_LEVEL",
    show_default=True,
    help="Least severe line that the log has.",
)
@click.option(
    "--log-format",
    type=click.Choice(FORMATS),
    default="auto",
    envvar="TROUPER_LOG_FORMAT",
    show_default=True,
    help="auto: for a person at a terminal, else a JSON object a line.",
)
@click.option(
    "--otlp-endpoint",
    metavar="URL",
    envvar="TROUPER_OTLP_ENDPOINT",
    help=(
        "Where traces of requests go: an OpenTelemetry collector, as in http://127.0.0.1:4318. Or "
        "OpenTelemetry's variables."
    ),
)
@click.pass_context
def serve(
    context: click.Context,
    /,
    *,
    models: tuple[str, ...],
    print_config: bool,
    log_level: str,
    log_format: Format,
    otlp_endpoint: str | None,
    **given: Any,
) -> None:
    """Serve models over HTTP, with OpenAI's and Anthropic's APIs. Each MODEL is a directory or a
    hub id; without one it is the embedded SmolLM2-135M-Instruct, for a first try."""
    add_models(context, models, given)
    console = Console(stderr=True)
    configure_logging(log_level, console, log_format)
    refused: list[str] = []
    failed: list[str] = []
    try:
        settings, server_settings = all_from(given, tables := model_tables(context))
        if print_config:
            click.echo(config_text(context), nl=False)
            for name, meant in misspelt(context, os.environ):
                click.echo(f"trouper: {NO_VARIABLE % (name, meant)}", err=True)
            return
        _log_file(context)
        for name, meant in misspelt(context, os.environ):
            logger.warning(NO_VARIABLE, name, meant)
        options = tables.options([model.model for model in settings])
        _run(settings, server_settings, options, console, otlp_endpoint)
    except* (ModelUnusable, SettingsInvalid, CannotListenError) as group:
        refused = [_message_of(context, error) for error in leaves(group)]
    except* ActorFailed as group:
        failed = [str(error) for error in leaves(group)]
    if failed:
        give_up(failed[0])
    if refused:
        refuse(refused[0])


def _log_file(context: click.Context) -> None:
    """Log which settings file is read, even if that file asks for a quieter log."""
    if (path := file_read(context)) is None:
        return
    is_quieted = context.get_parameter_source("log_level") is ParameterSource.DEFAULT_MAP
    if is_quieted or logger.isEnabledFor(logging.INFO):
        parts = {"name": logger.name, "levelno": logging.INFO, "levelname": "INFO"}
        logger.handle(logging.makeLogRecord({**parts, "msg": f"settings of {path}"}))


def _message_of(context: click.Context, error: BaseException) -> str:
    return settings_error(context, error) if isinstance(error, SettingsInvalid) else str(error)


def _run(
    settings: list[Settings],
    server_settings: ServerSettings,
    options: Mapping[str, ModelOptions],
    console: Console,
    otlp_endpoint: str | None,
) -> None:
    from trouper.cli import rank_process  # The whole server, which `trouper --help` does not need.
    from trouper.cli.server_process import run

    default_cache_dir()  # A user who has none is told before a model is loaded.
    watch_launcher(rank_process.leave_without_launcher)
    rank = rank_process.rank_of(os.environ)
    if rank is None:
        with tracing(otlp_endpoint) as observers:
            trio.run(
                partial(run, settings, server_settings, console, observers, options=options),
                clock=WakingClock(),
            )
        return
    model_settings = rank_process.only_model(settings)
    rank_process.bound_joining()
    if rank > 0:
        trio.run(rank_process.follow, model_settings, rank, clock=WakingClock())
        return
    leader = rank_process.leader(model_settings, os.environ)
    with rank_process.lost_is_an_exit_code(leader), tracing(otlp_endpoint) as observers:
        trio.run(
            partial(run, settings, server_settings, console, observers, ranks=leader),
            clock=WakingClock(),
        )
    end_at_once(0)  # Unwinding would wait for native code of the group.
