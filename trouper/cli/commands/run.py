"""`trouper run`: chat with a model that is served for this chat alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import click
from click.shell_completion import CompletionItem

from trouper.cli.commands.chat import chat

OF_OTHER_SERVERS = ("url", "name")


def _parameters() -> Iterator[click.Parameter]:
    """Those of `chat`, with the model as an argument."""
    for parameter in chat.params:
        if parameter.name == "own_model":
            yield click.Argument(
                ["own_model"],
                metavar="MODEL",
                shell_complete=lambda _context, _argument, begun: [
                    CompletionItem(begun, type="dir")
                ],
            )
            continue
        own = copy.copy(parameter)
        if isinstance(own, click.Option) and own.name in OF_OTHER_SERVERS:
            own.hidden = True
        yield own


run = click.Command(
    "run",
    callback=chat.callback,
    params=[*_parameters()],
    help="""Chat with MODEL, a directory or a hub id, on a server of its own that ends with the
    chat. With a QUESTION, or one in stdin, print its answer and end. The same as `trouper chat
    --model MODEL`.""",
)
