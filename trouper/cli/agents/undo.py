"""Copies of clients' files, and `trouper connect --undo`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import count
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
from trouper.cli.agents.merging import ConfigInvalid, Edit, dotted, reverted
from trouper.protocol.private_files import make_private

BACKUP = "trouper-backup"


@attrs.frozen
class Written:
    """A file as `--write` left it. `backup`: None for a new file."""

    format: str
    after: str
    backup: str | None


Log = dict[str, Written]
"""By path, oldest first. The texts hold keys."""


def write_with_backup(agent: str, change: Change) -> Path | None:
    """Copy the file once, note the change, and write. Returns the copy. Raises `ConfigInvalid`
    and `OSError`."""
    log, name = _read(agent), str(change.path.absolute())
    earlier = log.pop(name, None)
    before = change.before if earlier is None else _taken_back(change.path, earlier)[0]
    copy = None
    if before is not None:
        copy = (earlier and earlier.backup) or str(_free_name(change.path))
        replace(Path(copy), before, change.path.stat().st_mode & 0o7777)
    noted = Written(change.file.format.name, change.after, copy)
    _store(agent, log | {name: noted})
    try:
        change.write()
    except OSError:
        _store(agent, log if earlier is None else log | {name: earlier})
        raise
    return None if copy is None else Path(copy)


def undo(agent: str) -> Iterator[str]:
    """Take back changes, the last first, and yield lines for a person. Raises `ConfigInvalid`
    and `OSError`."""
    log = _read(agent)
    while log:
        name, written = log.popitem()
        lines = list(_undone(Path(name), written))
        _store(agent, log)
        yield from lines


def _undone(path: Path, written: Written) -> Iterator[str]:
    """Take our change to one file back, and yield lines for a person. An unneeded copy goes."""
    now = read_text(path)
    text, edits = _taken_back(path, written)
    if text == now:
        copy = None if written.backup is None else Path(written.backup)
        why = "" if copy is None or copy.exists() else f": {short(copy)} is gone"
        yield f"{short(path)}: nothing to undo{why}"
        return
    if text is None:
        path.unlink()
        yield f"{short(path)}: removed"
        return
    replace(Path(os.path.realpath(path)), text)
    if edits:
        yield f"{short(path)}: changed back; what was changed since stays"
        yield from (f"  {dotted(edit.path)}" for edit in edits)
    else:
        yield f"{short(path)}: as it was"
    if written.backup is not None and edits:
        yield f"  as it was: {short(Path(written.backup))}"
    elif written.backup is not None:
        Path(written.backup).unlink()


def _taken_back(path: Path, written: Written) -> tuple[str | None, tuple[Edit, ...]]:
    """Return the text without our change (None: no file), and the edits of a file that others
    have changed. Raises `ConfigInvalid`."""
    now = read_text(path)
    before = None if written.backup is None else read_text(Path(written.backup))
    is_new = written.backup is None
    lost_backup = before is None and not is_new
    if now is None or now == before or lost_backup:
        return now, ()
    if now == written.after:
        return before, ()
    file_format = FORMATS[written.format]
    old, new = (parsed(file_format, text) for text in (before or "", written.after))
    change = changed_by(ConfigFile(path, file_format, {}), lambda data: reverted(old, new, data))
    if is_new and not parsed(file_format, change.after):
        return None, ()
    return change.after, change.edits


def _free_name(path: Path) -> Path:
    endings = (BACKUP if number == 1 else f"{BACKUP}-{number}" for number in count(1))
    names = (path.with_name(f"{path.name}.{ending}") for ending in endings)
    return next(name for name in names if not os.path.lexists(name))


def _log_path(agent: str) -> Path:
    return run_dir(agent) / "undo.json"


def _read(agent: str) -> Log:
    """Raises `ConfigInvalid` for a damaged file."""
    path = _log_path(agent)
    try:
        log = cattrs.structure(json.loads(read_text(path) or "{}"), Log)
    except (ValueError, TypeError, AttributeError, cattrs.BaseValidationError) as error:
        raise ConfigInvalid(f"{short(path)} is damaged, and nothing can be undone by it") from error
    for written in log.values():
        if written.format not in FORMATS:
            raise ConfigInvalid(f"{short(path)}: this version of Trouper reads no {written.format}")
    return log


def _store(agent: str, log: Mapping[str, Written]) -> None:
    path = _log_path(agent)
    if not log:
        path.unlink(missing_ok=True)
        return
    make_private(path.parent)
    replace(path, json.dumps(cattrs.unstructure(log), indent=1))
