"""Number of connections within the limit on open files."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

from trouper.protocol.problems import SettingsInvalid

SPARE = 32
"""Descriptors kept from connections: for files, a compiler's pipes, the process that tries
grammars, the SSD tier and links of ranks."""
RESERVED = 8
"""Connections beyond --max-connections, for health and refusals."""
FLAG = "--max-connections"


def connection_limit(connections: int) -> tuple[int, str]:
    """Return the number of connections, and a line for the log if below `connections`. Raises the
    soft limit as far as possible. Raises `SettingsInvalid` if none fits."""
    others = other_files()
    soft = _raised_limit(connections + others)
    if soft is None or soft >= connections + others:
        return connections, ""
    remedy = f"raise it with ulimit -n {connections + others}"
    message = f"{FLAG} {connections} needs {connections + others} descriptors, the limit is {soft}"
    if soft <= others:
        raise SettingsInvalid(f"{message}, which leaves no room for any; {remedy}", FLAG)
    return soft - others, f"{message}: {soft - others} connections; {remedy}"


def other_files() -> int:
    return open_files() + SPARE + RESERVED


def is_spare(descriptor: int) -> bool:
    """Whether a new descriptor is among the last ones, kept from connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and descriptor >= soft - SPARE


def open_files() -> int:
    try:
        return sum(1 for _ in Path("/dev/fd").iterdir())
    except OSError:  # A container may have no such directory.
        return SPARE


def _raised_limit(needed: int) -> int | None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        with suppress(ValueError, OSError):  # A container may forbid it.
            bound = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (bound, hard))
            soft = bound
    return None if soft == resource.RLIM_INFINITY else soft
