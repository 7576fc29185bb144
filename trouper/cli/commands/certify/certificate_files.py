"""Files of a certificate: written as one, and read again."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from trouper.cli.commands.certify.certificate import FORMAT, Json
from trouper.cli.commands.certify.certificate_page import as_html
from trouper.cli.terminal_text import data_shown
from trouper.protocol.paths import is_directory

NAMES = ("command", "device", "made", "model", "sections", "system", "versions")
NAMES_WITHIN = {
    "device": set[str](),
    "model": {"name"},
    "system": {"system", "machine"},
    "versions": set[str](),
}
SECTION_NAMES = ("name", "status", "promises", "figures")


class NoCertificate(Exception):
    """A file that is no certificate, or cannot be read or written. The message names it."""


def paths_of(out: Path) -> list[Path]:
    return [out.with_name(out.name + suffix) for suffix in (".json", ".html")]


def require_writable(out: Path) -> None:
    """Find out before anything is measured whether the files can be written. Raises
    `NoCertificate`."""
    parent = out.absolute().parent
    if not out.name or not is_directory(parent):
        raise NoCertificate(f"{out}: there is no directory {parent}")
    if directories := [path for path in paths_of(out) if is_directory(path)]:
        raise NoCertificate(f"{directories[0]} is a directory")
    try:
        with tempfile.NamedTemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise NoCertificate(
            f"{parent} cannot be written to ({error.strerror}); name another one, as in --out "
            "~/certificate"
        ) from error


def write_certificate(certificate: Json, out: Path) -> list[Path]:
    """Write both files, each complete or not at all. Raises `NoCertificate`."""
    texts = (json.dumps(certificate, indent=1) + "\n", as_html(certificate))
    written = paths_of(out)
    for path, text in zip(written, texts, strict=True):
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise NoCertificate(f"{path} cannot be written: {error.strerror}") from error
    return written


def read_certificate(path: Path) -> Json:
    """Read a JSON file of `trouper certify`. Raises `NoCertificate`."""
    try:
        content: Any = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise NoCertificate(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise NoCertificate(
            f"{path} is no JSON ({error}); give the .json that trouper certify wrote"
        ) from error
    name = content.get("format") if isinstance(content, dict) else None
    if not isinstance(name, str) or name.partition("/")[0] != FORMAT.partition("/")[0]:
        raise NoCertificate(f"{path} is no certificate; give the .json that trouper certify wrote")
    if name != FORMAT:
        raise NoCertificate(
            f"{path} has the format {name}, which another version of trouper wrote; this one reads "
            f"{FORMAT}: make it again"
        )
    if not _is_complete(content):
        raise NoCertificate(
            f"{path} is not complete, or was changed: make it again by trouper certify"
        )
    return dict(data_shown(content))


def _is_complete(content: Json) -> bool:
    sections = content.get("sections")
    if not all(name in content for name in NAMES) or not isinstance(sections, list):
        return False
    return all(
        isinstance(content[name], dict) and content[name].keys() >= keys
        for name, keys in NAMES_WITHIN.items()
    ) and all(map(_is_section, sections))


def _is_section(section: Any) -> bool:
    if not isinstance(section, dict) or not all(name in section for name in SECTION_NAMES):
        return False
    if not isinstance(section["name"], str) or not isinstance(section["status"], str):
        return False
    promises, figures = section["promises"], section["figures"]
    return (
        isinstance(promises, list)
        and all(map(_is_promise, promises))
        and isinstance(figures, dict)
        and all(isinstance(value, int | float) for value in figures.values())
    )


def _is_promise(promise: Any) -> bool:
    return (
        isinstance(promise, dict)
        and isinstance(promise.get("text"), str)
        and promise.get("held", "") in (True, False, None)
    )
