"""What `trouper connect` has changed in a client's files, so that it can be taken back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import attrs
import cattrs

from trouper.cli.agents.agent import run_dir
from trouper.cli.agents.config_files import (
    Change,
    ConfigFile,
    changed_by,
    parsed,
    read_text,
    replace,
    short,
)
from trouper.cli.agents.config_formats import FORMATS
from trouper.cli.agents.merging import ConfigInvalid, dotted, edits_back
from trouper.protocol.private_files import make_private

FILE = "undo.json"


@attrs.frozen
class FileChange:
    """A change of one file. `before` is None if there was no file."""

    path: str
    format: str
    before: str | None
    after: str
    backup: str | None = None
    """The copy that was kept beside it."""


class UndoLog:
    """The changes of one client's files, oldest first. They hold what the files held, so only their
    owner may read them."""

    def __init__(self, agent: str) -> None:
        self._path = run_dir(agent) / FILE

    def read(self) -> list[FileChange]:
        """Raises `ConfigInvalid` for a file that is damaged."""
        text = read_text(self._path)
        try:
            return cattrs.structure(json.loads(text or "[]"), list[FileChange])
        except (ValueError, TypeError, cattrs.BaseValidationError) as error:
            raise ConfigInvalid(
                f"{short(self._path)} is damaged, and nothing can be undone by it"
            ) from error

    def write(self, changes: Sequence[FileChange]) -> None:
        """Raises `OSError`."""
        if not changes:
            self._path.unlink(missing_ok=True)
            return
        make_private(self._path.parent)
        replace(self._path, json.dumps(cattrs.unstructure(changes), indent=1))

    def add(self, change: Change, backup: Path | None) -> None:
        """Note a change that was made. One that continues the last is one with it. Raises
        `ConfigInvalid` and `OSError`."""
        known = self.read()
        copy = None if backup is None else str(backup)
        new = FileChange(
            str(change.path.absolute()), change.file.format.name, change.before, change.after, copy
        )
        last = next((one for one in reversed(known) if one.path == new.path), None)
        if last is not None and last.after == new.before:
            known.remove(last)
            new = attrs.evolve(new, before=last.before, backup=last.backup or copy)
        self.write([*known, new])


def undo(agent: str) -> Iterator[str]:
    """Take back what was changed in the files of a client, the last change first. Yields a line for
    each file. Raises `ConfigInvalid` for a file that cannot be changed back; what comes before it
    is done."""
    log = UndoLog(agent)
    changes = log.read()
    while changes:
        lines = list(_undone(changes[-1]))
        changes.pop()
        log.write(changes)
        yield from lines


def _undone(written: FileChange) -> Iterator[str]:
    path = Path(written.path)
    now = read_text(path)
    if now is None or now == written.before:
        yield f"{short(path)}: nothing to undo"
        return
    if now == written.after:
        _restore(path, written)
        yield f"{short(path)}: {'removed' if written.before is None else 'as it was'}"
        return
    change = _change_back(path, written)
    if not change.edits:
        yield f"{short(path)}: changed since, nothing of it is ours any more"
        return
    if written.before is None and not parsed(change.file.format, change.after):
        path.unlink()
        yield f"{short(path)}: removed"
        return
    change.write()
    yield f"{short(path)}: changed back; what was changed since stays"
    yield from (f"  {dotted(edit.path)}" for edit in change.edits)


def _restore(path: Path, written: FileChange) -> None:
    """Restore a file that nobody has changed since, and remove the copy of it."""
    if written.before is None:
        path.unlink()
        return
    replace(Path(os.path.realpath(path)), written.before)
    if written.backup is not None:
        with suppress(OSError, UnicodeDecodeError):
            if Path(written.backup).read_bytes().decode() == written.before:
                Path(written.backup).unlink()


def _change_back(path: Path, written: FileChange) -> Change:
    file_format = FORMATS[written.format]
    before, after = parsed(file_format, written.before or ""), parsed(file_format, written.after)
    return changed_by(ConfigFile(path, file_format, {}), lambda now: edits_back(before, after, now))
