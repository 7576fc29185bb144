"""`trouper doctor`: check whether a server would run here, and how well."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trouper.cli.agent_checks import CHECKS_FOR_AGENTS
from trouper.cli.doctor_checks import CHECKS, Check, CheckedSettings, Finding
from trouper.cli.exits import refuse
from trouper.cli.flag_groups import CommandWithFlagsOfServe
from trouper.cli.flags import MODELS, add_models, all_from, flags_of, misspelt
from trouper.cli.settings_file import configured, file_read, model_tables
from trouper.cli.terminal_text import line_shown
from trouper.cli.usage_errors import settings_error
from trouper.process import prepare_process
from trouper.protocol.problems import SettingsInvalid
from trouper.protocol.settings import ServerSettings, Settings

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
FAILED = 1  # A finding would keep a server from running.


@click.command(cls=CommandWithFlagsOfServe)
@MODELS
@configured
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object, to send along with a question."
)
@click.option(
    "--for",
    "purpose",
    type=click.Choice(["agents"]),
    help="agents: check whether the model suits coding agents, and list models that do.",
)
@flags_of(Settings)
@flags_of(ServerSettings)
@click.pass_context
def doctor(
    context: click.Context,
    /,
    *,
    models: tuple[str, ...],
    as_json: bool,
    purpose: str | None,
    **values: Any,
) -> None:
    """Check whether `trouper serve` would run on this machine with the same flags, and how well:
    device, memory, model, disk, port, keys. Exit code 1 if it would not."""
    add_models(context, models, values)
    try:
        plan = CheckedSettings(
            *all_from(values, model_tables(context)),
            file_read(context),
            [*misspelt(context, os.environ)],
        )
    except SettingsInvalid as invalid:
        refuse(settings_error(context, invalid))
    prepare_process()
    console = Console(width=None if sys.stdout.isatty() else 160)
    found: list[tuple[str, Finding]] = []
    for subject, finding in examined(plan, CHECKS_FOR_AGENTS if purpose == "agents" else CHECKS):
        found.append((subject, finding))
        if not as_json:
            console.print(_row(subject, finding))
    if as_json:
        click.echo(
            json.dumps([_finding_body(subject, finding) for subject, finding in found], indent=1)
        )
    if any(finding.level == "fail" for _, finding in found):
        sys.exit(FAILED)


def _finding_body(subject: str, finding: Finding) -> dict[str, str]:
    return {
        "subject": subject,
        "level": finding.level,
        "said": finding.message,
        "remedy": finding.remedy,
    }


def examined(plan: CheckedSettings, checks: Mapping[str, Check]) -> Iterator[tuple[str, Finding]]:
    # A check that raises is a finding, too.
    for subject, check in checks.items():
        try:
            for finding in check(plan):
                yield subject, finding
        except Exception as error:  # noqa: BLE001
            # Whatever is broken here is what the doctor is for.
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            yield subject, Finding("fail", message, "see what is said above")


def _row(subject: str, finding: Finding) -> Table:
    row = Table.grid(padding=(0, 1))
    row.add_column(width=4)
    row.add_column(width=10)
    row.add_column(overflow="fold")
    message = Text(line_shown(finding.message))
    if finding.remedy:
        message.append(f"\n-> {line_shown(finding.remedy)}", style="bold")
    row.add_row(Text(finding.level, style=COLOURS[finding.level]), subject, message)
    return row
