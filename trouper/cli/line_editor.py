"""Input of lines in a terminal: editing, history, and pasted lines."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from trouper.cli.terminal_text import text_of
from trouper.protocol.paths import xdg_directory
from trouper.protocol.private_files import FILE_MODE, make_private
from trouper.protocol.problems import SettingsInvalid

PROMPT, CONTINUED = "> ", ". "


def history_file() -> Path:
    """Raises `SettingsInvalid` for a user without a home directory."""
    return xdg_directory("XDG_STATE_HOME", ".local/state") / "trouper" / "chat-history"


class FailsafeHistory(FileHistory):
    """A history file that ignores write errors: with a full disk, questions can still be asked."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(text_of(string))


def history() -> History:
    """Return the history of all sessions, readable by its owner only. Where no file can be written,
    it is of this session, and a line says so."""
    try:
        path = history_file()
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


def session(commands: Iterable[str]) -> PromptSession[str]:
    """Return a prompt session with the history of earlier sessions."""
    return PromptSession(
        PROMPT,
        history=history(),
        auto_suggest=AutoSuggestFromHistory(),
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        multiline=True,
        prompt_continuation=CONTINUED,
        key_bindings=_keys(),
    )


def _keys() -> KeyBindings:
    """Return key bindings: Enter sends, as usual; Alt-Enter breaks the line. Pasted text keeps its
    lines."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
