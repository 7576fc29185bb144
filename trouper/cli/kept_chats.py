"""Conversations of `trouper chat` that later sessions go on with."""

from __future__ import annotations

import secrets
import stat
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from operator import itemgetter
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
            for path, _ in self._newest_first()[MAX_KEPT:]:
                path.unlink(missing_ok=True)
        elif self._current is not None:  # All was taken back.
            self._current.unlink(missing_ok=True)
        self._content = content

    def begin_another(self) -> None:
        self._current = None

    def listed(self) -> str:
        earlier = [(path, at) for path, at in self._newest_first() if path != self._current]
        self._listed = [path for path, _ in earlier]
        lines = [
            f"{number:>2}  {_shown_time(at)}  {_about(path)}"
            for number, (path, at) in enumerate(earlier[:MAX_LISTED], 1)
        ]
        if not lines:
            return "no earlier conversation is kept"
        return "\n".join((*lines, "", "/resume NUMBER goes on with one of them"))

    def resume(self, number: str) -> Conversation:
        """Take up an earlier conversation. Raises `CommandRefused`."""
        if not self._listed:
            self.listed()
        path = dict(zip(map(str, count(1)), self._listed, strict=False)).get(number)
        if path is None:
            raise CommandRefused(f"there is no conversation {number[:20]}; /resume lists them")
        found = read_chat(path, path.name)
        self._current, self._content, self._listed = path, written(found), ()
        return found

    def _file(self) -> Path:
        if self._current is None:
            name = f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}-{secrets.token_hex(4)}.json"
            self._current = self.directory / name
        return self._current

    def _newest_first(self) -> list[tuple[Path, float]]:
        """Return the files with the times of their last changes, in Unix seconds."""
        files = list[tuple[Path, float]]()
        for path in self.directory.glob("*.json"):
            with suppress(FileNotFoundError):  # Another session has removed it meanwhile.
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    files.append((path, status.st_mtime))
        return sorted(files, key=itemgetter(1), reverse=True)


def _shown_time(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds, UTC).astimezone():%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):  # A file system may have any time.
        return "at an unknown time"


def _about(path: Path) -> str:
    try:
        messages = read_chat(path, path.name).messages
    except CommandRefused as refused:
        return line_shown(str(refused))
    questions = (message["content"] for message in messages if message["role"] == "user")
    text = textwrap.shorten(shown(next(questions, "")), QUESTION_WIDTH, placeholder=" ...")
    return line_shown(text)
