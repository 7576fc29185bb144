"""Which model and LoRA adapter a request names: `MODEL:ADAPTER`, `ADAPTER`, mlx-lm's field
`adapters`, or an unknown name that an alias answers (--model-alias)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trouper.actors.runtime.served_models import ModelEntry, Models
from trouper.protocol.names import aliased, aliases_in_use
from trouper.protocol.problems import adapter_not_found, bad_request, quoted

log = logging.getLogger("trouper.web")
MAX_LOGGED = 100  # Unknown names whose first use is logged; clients choose the names.


class ModelAliases:
    """Models that answer to unknown names (--model-alias)."""

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


def split_adapter(model: str | None, entries: Sequence[ModelEntry]) -> tuple[str | None, str]:
    """Split a requested name into model and adapter ("": none). Raises `RequestFailed` (404) for an
    unknown or unloaded adapter."""
    if model is None or any(model in entry.names for entry in entries):
        return model, ""
    base, _, name = model.rpartition(":")
    for entry in entries:
        if model in entry.adapters:
            return entry.names[0], model
        if base in entry.names and (entry.adapters or entry.unloaded_adapters):
            return base, checked_adapter(name, entry)
    for entry in entries:
        if model in entry.unloaded_adapters:
            return entry.names[0], checked_adapter(model, entry)
    return model, ""


def checked_adapter(adapter: str, entry: ModelEntry) -> str:
    if adapter not in entry.adapters:
        raise adapter_not_found(adapter, entry.names[0], entry.adapters)
    return adapter


def agreed_adapter(named: str, field: str | None, entry: ModelEntry) -> str:
    """Return the adapter from `model` or `adapters`. Raises `RequestFailed`: 404 for an unknown
    adapter, 400 for two different ones."""
    if field is None or field == named:
        return named
    if named:
        raise bad_request(
            f"model names the adapter {named!r} and adapters {field!r}: name one",
            "adapters",
            "invalid_value",
        )
    return checked_adapter(field, entry)
