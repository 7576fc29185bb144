from __future__ import annotations

import difflib
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from trouper.cli.agents.config_formats import Format
from trouper.cli.agents.merging import (
    KEY_VARIABLE,
    MISSING,
    ConfigInvalid,
    Edit,
    dotted,
    edits_between,
    merged,
)
from trouper.protocol.paths import home_directory
from trouper.protocol.private_files import FILE_MODE, make_parents

SENSITIVE = re.compile(r"key$|(?<!per_)token$|secret|password|authorization", re.IGNORECASE)
SENSITIVE_LINE = re.compile(
    r"(?<![\w-])(?P<name>[\w-]*(?:key|(?<!per_)token|secret|password|authorization)"
    r"[\"']?\s*[:=]\s*[\"']?)(?P<value>[^\"',\s]+)",
    re.IGNORECASE,
)
PUBLIC = frozenset({"none", "${{", "true", "false", "null"})
VARIABLE = re.compile(rf"\b{KEY_VARIABLE}\b", re.IGNORECASE)
BOM = "\ufeff"


@attrs.frozen
class ConfigFile:
    path: Path
    format: Format
    values: Mapping[str, Any]
    may_be_link: bool = True
    """A link in a working directory may be a stranger's."""
    summary: str = ""
    """Printed in place of long contents"""


@attrs.frozen
class Change:
    """`before` is None for a new file."""

    file: ConfigFile
    before: str | None
    after: str
    edits: tuple[Edit, ...]

    @property
    def path(self) -> Path:
        return self.file.path

    def diff(self) -> str:
        """Return a diff with secrets masked, and without context, which may hold others."""
        shown = short(self.path)
        lines = difflib.unified_diff(
            (self.before or "").splitlines(keepends=True),
            self.after.splitlines(keepends=True),
            shown if self.before is not None else "/dev/null",
            shown,
            n=0,
        )
        return "".join(_masked_line(line if line.endswith("\n") else line + "\n") for line in lines)

    def described(self) -> list[str]:
        return [_described(edit) for edit in self.edits]

    def write(self) -> None:
        """Write the file. A link stays a link. Raises `OSError`."""
        target = Path(os.path.realpath(self.path))
        make_parents(target)
        replace(target, self.after)


def change_of(file: ConfigFile) -> Change:
    """Raises `ConfigInvalid`."""
    return changed_by(file, lambda data: merged(data, file.values))


def changed_by(file: ConfigFile, change: Callable[[Any], Any]) -> Change:
    """`change` maps the file's data to other data. Raises `ConfigInvalid`."""
    try:
        if not file.may_be_link and file.path.is_symlink():
            target = file.path.readlink()
            raise ConfigInvalid(f"it is a link to {target}; remove it, or work elsewhere")
        before = read_text(file.path)
        text = before or ""
        data = parsed(file.format, text)
        new_data = change(data)
        edits = tuple(edits_between(data, new_data))
        after = _changed(file.format, text, edits) if edits else text
        if parsed(file.format, after) != new_data:
            raise ConfigInvalid(
                "it is written in a way that cannot be changed safely; change the values by hand"
            )
    except RecursionError as error:
        raise ConfigInvalid(f"{short(file.path)}: it is nested too deep") from error
    except ConfigInvalid as invalid:
        raise ConfigInvalid(f"{short(file.path)}: {invalid}") from invalid
    return Change(file, before, after, edits)


def parsed(format: Format, text: str) -> Any:
    """Raises `ConfigInvalid`."""
    return format.parse(text.removeprefix(BOM).replace("\r\n", "\n"))


def short(path: Path) -> str:
    try:
        return f"~/{path.relative_to(home_directory())}"
    except ValueError:  # Or no home, which is one, too.
        return str(path)


def read_text(path: Path) -> str | None:
    """Return None without a file. Raises `ConfigInvalid`."""
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise ConfigInvalid("it is not UTF-8") from error
    except OSError as error:
        raise ConfigInvalid(error.strerror or str(error)) from error


def _changed(format: Format, text: str, edits: tuple[Edit, ...]) -> str:
    """Line ends and the byte order mark stay."""
    mark = BOM if text.startswith(BOM) else ""
    after = format.changed(text.removeprefix(BOM).replace("\r\n", "\n"), edits)
    return mark + (after.replace("\n", "\r\n") if "\r\n" in text else after)


def replace(path: Path, text: str, mode: int | None = None) -> None:
    """Write a file atomically. `mode` None: the file's own, or for the owner only."""
    if mode is None:
        mode = path.stat().st_mode & 0o7777 if path.exists() else FILE_MODE
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _is_public(value: str) -> bool:
    """Whether a sensitive name's value is a placeholder or refers to the variable."""
    return value.lower() in PUBLIC or ("\n" not in value and VARIABLE.search(value) is not None)


def _described(edit: Edit) -> str:
    what = dotted(edit.path)
    if edit.new is MISSING:
        return f"{what} removed"
    if isinstance(edit.new, dict | list):
        return f"{what} {'added' if edit.old is MISSING else 'replaced'}"
    secret = bool(SENSITIVE.search(str(edit.path[-1])))
    was = "" if edit.old is MISSING else f" (was {_shown(edit.old, secret=secret)})"
    return f"{what} = {_shown(edit.new, secret=secret)}{was}"


def _shown(value: Any, *, secret: bool) -> str:
    return "***" if secret and not _is_public(str(value)) else repr(value)


def _masked_line(line: str) -> str:
    return SENSITIVE_LINE.sub(
        lambda match: match["name"] + (match["value"] if _is_public(match["value"]) else "***"),
        line,
    )
