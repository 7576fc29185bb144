"""The command `trouper`, whose commands are imported when they are called."""

from __future__ import annotations

import time

import click

from trouper import __version__
from trouper.cli.foreign_flags import FOREIGN_COMMANDS
from trouper.cli.lazy_group import LazyGroup

BEGAN = time.perf_counter()
"""Before a command's imports."""
COMMANDS = {
    "serve": "Serve models over HTTP.",
    "launch": "Start ranks that serve one model together.",
    "connect": "Set up a coding agent to use this server.",
    "run": "Chat with a model: serve and chat in one.",
    "chat": "Talk to a model.",
    "top": "Watch a running server.",
    "doctor": "Check this machine and the settings.",
    "cache": "List, check and remove cached prompts on disk.",
    "models": "List, download and remove models of this machine.",
    "metrics": "Print a dashboard or alerts for Grafana and Prometheus.",
    "completion": "Print a script that completes commands and flags.",
}
"""The short help of each: with it `trouper --help` imports none of them."""
LAB_COMMANDS = {
    "bench": "Measure a server, or a model on this machine.",
    "certify": "Run the certificate: check every promise here.",
}
LAB_REMEDY = (
    "it is in the package trouper-lab: in a checkout `uv sync --frozen --inexact --all-packages`, "
    "else install its wheel beside trouper's"
)


@click.group(
    cls=LazyGroup,
    lazy_commands={name: f"trouper.cli.commands.{name}" for name in COMMANDS},
    short_helps=COMMANDS | LAB_COMMANDS,
    entry_points="trouper.commands",
    foreign_commands=FOREIGN_COMMANDS,
    installed_by=dict.fromkeys(LAB_COMMANDS, LAB_REMEDY),
)
@click.version_option(__version__, message="trouper %(version)s")
def main() -> None:
    """Serve language models on this machine, with OpenAI's and Anthropic's APIs. Begin with
    `trouper run MODEL` to chat, or `trouper serve MODEL` for programs and coding agents.

    Each flag of a command can also be a variable, as in TROUPER_PORT=8123, or stand in a settings
    file; `trouper serve --print-config` shows one."""
