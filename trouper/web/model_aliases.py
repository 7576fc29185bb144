"""Models that answer to unknown names (--model-alias)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trouper.actors.runtime.served_models import ModelEntry, Models
from trouper.protocol.names import aliased, aliases_in_use
from trouper.protocol.problems import quoted

log = logging.getLogger("trouper.web")
MAX_LOGGED = 100
"""Unknown names whose first use is logged; clients choose the names."""


class ModelAliases:
    def __init__(self, models: Models, given: Sequence[str]) -> None:
        self._models, self._given = models, given
        self._logged: set[str] = set()

    @property
    def patterns(self) -> tuple[str, ...]:
        return aliases_in_use(self._given, len(self._models.entries()))

    def resolved(self, name: str, entries: Sequence[ModelEntry]) -> str:
        """Return the answering model's name; `name` itself if a model has that name or no alias
        matches. `entries` are the key's models, the default first."""
        names = [entry.names for entry in entries]
        if any(name in own for own in names):
            return name
        index = aliased(name, self.patterns, names)
        if index is None:
            return name
        label = quoted(name)  # A client may send names of megabytes.
        if label not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(label)
            log.info("no model is named %s; %s answers (--model-alias)", label, names[index][0])
        return names[index][0]
