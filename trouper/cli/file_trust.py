"""Which settings files count without being named, and what that of the working directory may say.

A working directory may be a repository of strangers. Its `trouper.toml` is for `trouper serve`
alone, and neither opens the server nor names secrets, code, or places that the server reads from or
writes to. A file that is named by --config may say everything.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trouper.protocol.hosts import is_loopback
from trouper.protocol.private_files import others_write

NEVER_HERE = frozenset(
    {
        *("api_key", "api_key_file", "allow_no_key", "allow_admin_without_key", "allowed_hosts"),
        *("cors_origins", "ssd_cache_dir", "batch_dir", "otlp_endpoint", "adapters_from"),
        "rank_secret_file",
    }
)
"""Settings that open the server, name a secret, have prompts sent elsewhere, or say which files the
server reads, writes and removes."""
LOOPBACK_HERE = frozenset({"host", "control_host"})
"""Addresses to listen on, which may be loopback only."""
NOT_TAKEN = "is not taken from the working directory"


class FileNotTrusted(Exception):
    """A settings file that does not count. The message says why."""


def read_trusted(path: Path) -> bytes | None:
    """Return the content of a file that nobody but this user and root can have written; None: there
    is no file. Raises `FileNotTrusted`, and `OSError` for one that may not be looked at."""
    try:
        link = path.lstat()
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb") as file:
            status = os.fstat(file.fileno())  # Of what is read, whatever takes its place.
            for owner in (link.st_uid, status.st_uid):
                if owner not in (0, os.geteuid()):
                    raise FileNotTrusted(f"{_user(owner)} owns it; {_by_name(path)}")
            if others_write(status):
                raise FileNotTrusted(f"others may write to it; `chmod go-w`, or {_by_name(path)}")
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def refused_here(path: Path, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings that the working directory's file may not have, each with the reason."""
    for name, value in values.items():
        if name in NEVER_HERE:
            yield name, f"{NOT_TAKEN}; {_by_name(path)}"
        elif name in LOOPBACK_HERE and not is_loopback(str(value)):
            yield name, f"{value} is no loopback address, and {NOT_TAKEN}; {_by_name(path)}"


def _by_name(path: Path) -> str:
    return f"name the file by --config {path} if you trust it"


def _user(number: int) -> str:
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user {number}"
