"""Lines that a person types: edited, remembered, several at a time if pasted."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT, CONTINUED = "> ", ". "


def history_file() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "trouper" / "chat-history"


def session(commands: Iterable[str]) -> PromptSession[str]:
    """With the history of earlier sessions, which is for its owner's eyes only."""
    path = history_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    return PromptSession(
        PROMPT,
        history=FileHistory(str(path)),
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
