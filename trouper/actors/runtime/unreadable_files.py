"""Files of the cache directory that the disk does not read. One alone is set aside; several in a
row mean that the disk is faulty."""

from __future__ import annotations

import logging

from trouper.protocol.problems import is_shortage

log = logging.getLogger("trouper.writer")
MAX_IN_A_ROW = 2
"""Number of files, one after another, that are set aside. With the next one the disk counts as
faulty."""


class UnreadableFiles:
    """Decides for each file that cannot be read whether it is the file's fault or the disk's."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._named: set[str] = set()

    def note(self, name: str, error: OSError) -> None:
        """Note a file that cannot be read, and name it in the log once. Raises the error if it is
        the disk's fault."""
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
        """Note that a file was read: the disk works."""
        self._in_a_row = 0
