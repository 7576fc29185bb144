"""Conversations of `trouper chat` that later sessions go on with."""

from __future__ import annotations

import secrets
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import attrs

from trouper.cli.agents.config_files import replace
from trouper.cli.conversation import CommandRefused, Conversation, read_chat, shown, written
from trouper.cli.terminal_text import line_shown
from trouper.protocol.paths import xdg_directory
from trouper.protocol.private_files import FILE_MODE, make_private

MAX_KEPT = 100
MAX_LISTED = 15
QUESTION_WIDTH = 60


def state_directory() -> Path:
    """Raises `SettingsInvalid` for a user without a home directory."""
    return xdg_directory("XDG_STATE_HOME", ".local/state") / "trouper"


@attrs.define
class KeptChats:
    """A file for each conversation, the newest `MAX_KEPT` of them."""

    directory: Path
    _current: Path | None = None
    _content: str = ""
    _listed: Sequence[Path] = ()

    @classmethod
    def opened(cls) -> KeptChats:
        """Raises `SettingsInvalid`, and `OSError` for a directory that is not the user's alone."""
        directory = state_directory() / "chats"
        make_private(directory)
        return cls(directory)

    def keep(self, conversation: Conversation) -> None:
        """Write what has changed. Raises `OSError`."""
        content = written(conversation)
        if content == self._content:
            return
        if conversation.messages:
            replace(self._file(), content, FILE_MODE)
            for path in self._newest_first()[MAX_KEPT:]:
                path.unlink(missing_ok=True)
        elif self._current is not None:  # All was taken back.
            self._current.unlink(missing_ok=True)
        self._content = content

    def begin_another(self) -> None:
        self._current = None

    def listed(self) -> str:
        self._listed = [path for path in self._newest_first() if path != self._current]
        lines = [
            f"{number:>2}  {_when(path)}  {_about(path)}"
            for number, path in enumerate(self._listed[:MAX_LISTED], 1)
        ]
        if not lines:
            return "no earlier conversation is kept"
        return "\n".join((*lines, "", "/resume NUMBER goes on with one of them"))

    def resume(self, number: str) -> Conversation:
        """Take up an earlier conversation. Raises `CommandRefused`."""
        if not self._listed:
            self.listed()
        if not number.isdecimal() or not 1 <= int(number) <= len(self._listed):
            raise CommandRefused(f"there is no conversation {number}; /resume lists them")
        path = self._listed[int(number) - 1]
        found = read_chat(path, path.name)
        self._current, self._content, self._listed = path, written(found), ()
        return found

    def _file(self) -> Path:
        if self._current is None:
            name = f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}-{secrets.token_hex(4)}.json"
            self._current = self.directory / name
        return self._current

    def _newest_first(self) -> list[Path]:
        files = [path for path in self.directory.glob("*.json") if path.is_file()]
        return sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _when(path: Path) -> str:
    return f"{datetime.fromtimestamp(path.stat().st_mtime, UTC).astimezone():%Y-%m-%d %H:%M}"


def _about(path: Path) -> str:
    try:
        messages = read_chat(path, path.name).messages
    except CommandRefused as refused:
        return line_shown(str(refused))
    questions = (message["content"] for message in messages if message["role"] == "user")
    text = textwrap.shorten(shown(next(questions, "")), QUESTION_WIDTH, placeholder=" ...")
    return line_shown(text)
