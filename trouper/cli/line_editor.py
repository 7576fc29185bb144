"""Lines that a person types: edited, remembered, several at a time if pasted."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from trouper.cli.typed_input import text_of

PROMPT, CONTINUED = "> ", ". "


def history_file() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "trouper" / "chat-history"


class FailsafeHistory(FileHistory):
    """A disk that is full meanwhile takes no question away."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(text_of(string))


def history() -> History:
    """Of earlier sessions too, for their owner's eyes only. Where no file can be, of this one, and a line says so."""
    path = history_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.open("r+b").close()
    except OSError as error:
        click.secho(f"questions are not kept: {error.filename}: {error.strerror}", dim=True)
        return InMemoryHistory()
    return FailsafeHistory(str(path))


def session(commands: Iterable[str]) -> PromptSession[str]:
    """With the history of earlier sessions."""
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
    """Enter sends, as everybody expects; Alt-Enter breaks the line. What is pasted keeps its lines."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
