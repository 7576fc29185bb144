"""`trouper completion`: click's own scripts for the shells."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

PROGRAM, VARIABLE = "trouper", "_TROUPER_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, /, shell: str) -> None:
    """Print a script that completes commands and flags.

    \b
    bash:  eval "$(trouper completion bash)"      in ~/.bashrc
    zsh:   eval "$(trouper completion zsh)"       in ~/.zshrc, after compinit
    fish:  trouper completion fish > ~/.config/fish/completions/trouper.fish
    """  # noqa: D301 - click reads the backspace itself
    found = get_completion_class(shell)
    assert found is not None, "click knows these"
    click.echo(found(context.find_root().command, {}, PROGRAM, VARIABLE).source())
