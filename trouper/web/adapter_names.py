"""LoRA adapters in requests: as the model (`MODEL:ADAPTER`, `ADAPTER`), or in mlx-lm's field
`adapters`."""

from __future__ import annotations

from collections.abc import Sequence

from trouper.actors.runtime.served_models import ModelEntry
from trouper.protocol.problems import adapter_not_found, bad_request


def split(model: str | None, entries: Sequence[ModelEntry]) -> tuple[str | None, str]:
    """Split a requested name into model and adapter ("": none). Raises `RequestFailed` (404) for an
    unknown or unloaded adapter."""
    if model is None or any(model in entry.names for entry in entries):
        return model, ""
    base, _, name = model.rpartition(":")
    for entry in entries:
        if model in entry.adapters:
            return entry.names[0], model
        if base in entry.names and (entry.adapters or entry.unloaded_adapters):
            return base, checked(name, entry)
    for entry in entries:
        if model in entry.unloaded_adapters:
            return entry.names[0], checked(model, entry)
    return model, ""


def checked(adapter: str, entry: ModelEntry) -> str:
    if adapter not in entry.adapters:
        raise adapter_not_found(adapter, entry.names[0], entry.adapters)
    return adapter


def agreed(named: str, field: str | None, entry: ModelEntry) -> str:
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
    return checked(field, entry)
