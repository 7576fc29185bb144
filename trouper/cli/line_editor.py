"""Input of lines in a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from trouper.cli.kept_chats import state_directory
from trouper.cli.terminal_text import text_of
from trouper.protocol.private_files import FILE_MODE, make_private
from trouper.protocol.problems import SettingsInvalid

PROMPT, CONTINUED = "> ", ". "


class FailsafeHistory(FileHistory):
    """A history file that ignores write errors, as on a full disk."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(text_of(string))


def history() -> History:
    """Return the history of all sessions, or of this one where no file can be written."""
    try:
        path = state_directory() / "chat-history"
        make_private(path.parent)
        path.touch(FILE_MODE)
        path.open("r+b").close()
    except OSError as error:
        click.secho(f"questions are not kept: {error.filename}: {error.strerror}", dim=True)
        return InMemoryHistory()
    except SettingsInvalid as invalid:
        click.secho(f"questions are not kept: {invalid}", dim=True)
        return InMemoryHistory()
    return FailsafeHistory(str(path))


def session(commands: Iterable[str], *, keeps: bool) -> PromptSession[str]:
    return PromptSession(
        PROMPT,
        history=history() if keeps else InMemoryHistory(),
        auto_suggest=AutoSuggestFromHistory(),
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        multiline=True,
        prompt_continuation=CONTINUED,
        key_bindings=_keys(),
    )


def _keys() -> KeyBindings:
    """Enter sends, Alt-Enter breaks the line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
