"""The command `trouper`: flags, logging, signals, and what a person at a terminal sees. One file a command.

What is heavy is imported when a command runs, so that completion and help are quick.
"""

from __future__ import annotations

import click

from trouper import __version__
from trouper.garbage import collected_later

with collected_later():
    from trouper.cli.commands import (
        bench,
        cache,
        certify,
        chat,
        completion,
        connect,
        doctor,
        launch,
        models,
        serve,
        top,
    )
    from trouper.cli.usage_errors import OneLineErrors


@click.group(cls=OneLineErrors)
@click.version_option(__version__, message="trouper %(version)s")
def main() -> None:
    """An LLM server of six actors on MLX and Trio. A flag can also be a variable, as in TROUPER_PORT=8123, or stand in
    a settings file (`trouper serve --print-config` shows one)."""


for _command in (
    serve.serve, launch.launch, connect.connect, chat.chat, top.top, bench.bench, doctor.doctor, certify.certify, cache.cache, models.models, completion.completion,
):  # fmt: skip
    main.add_command(_command)
