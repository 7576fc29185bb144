"""Unreadable files of the cache directory. One alone is set aside; several in a row mean a faulty
disk."""

from __future__ import annotations

import logging

from trouper.protocol.problems import is_shortage

log = logging.getLogger("trouper.writer")
MAX_IN_A_ROW = 2
"""Number of consecutive files that are set aside before the disk counts as faulty."""


class UnreadableFiles:
    def __init__(self) -> None:
        self._in_a_row = 0
        self._named: set[str] = set()

    def note(self, name: str, error: OSError) -> None:
        """Note an unreadable file, logged once. Raises the error if the disk is at fault."""
        self._in_a_row += 1
        if is_shortage(error) or self._in_a_row > MAX_IN_A_ROW:
            self._in_a_row = 0
            raise error
        if name not in self._named:
            self._named.add(name)
            log.warning(
                "the file %s of the cache cannot be used (%s); going on without it",
                name,
                error.strerror or error,
            )

    def was_read(self) -> None:
        self._in_a_row = 0
