"""Log of what the model cannot read: one line for each type of content."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from trouper.protocol.requests import Generate, ignored_parts

log = logging.getLogger("trouper.web")


class IgnoredLog:
    """Remembers which types of content are in the log already."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, requests: Iterable[Generate]) -> None:
        for name in ignored_parts(requests):
            if name not in self._logged:
                self._logged.add(name)
                log.warning(
                    "content of type %s is not read: the model reads text only, a placeholder stands for it", name
                )
