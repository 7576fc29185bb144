"""Names of LoRA adapters in requests: `MODEL:ADAPTER` or `ADAPTER` as the model, or mlx-lm's field
`adapters`."""

from __future__ import annotations

from collections.abc import Sequence

from trouper.actors.runtime.served_models import ModelEntry
from trouper.protocol.problems import adapter_not_found, bad_request


def split(model: str | None, entries: Sequence[ModelEntry]) -> tuple[str | None, str]:
    """Split the name that a request gives its model into model and adapter; "": it names no
    adapter. Raises `RequestFailed` (404) for an adapter that a model with adapters does not have,
    and for one that was unloaded: the model itself, which answers to any name where it is the only
    one, would answer in its place without a word."""
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
    """Return the adapter. Raises `RequestFailed` (404) if the model does not have it."""
    if adapter not in entry.adapters:
        raise adapter_not_found(adapter, entry.names[0], entry.adapters)
    return adapter


def agreed(named: str, field: str | None, entry: ModelEntry) -> str:
    """The adapter that a request names in its model, or in its field. Raises `RequestFailed`: 404
    for one that the model does not have, 400 for two."""
    if field is None or field == named:
        return named
    if named:
        raise bad_request(
            f"model names the adapter {named!r} and adapters {field!r}: name one",
            "adapters",
            "invalid_value",
        )
    return checked(field, entry)
