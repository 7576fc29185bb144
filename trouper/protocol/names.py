"""Names of models in the API."""

from __future__ import annotations

from collections.abc import Sequence

from trouper.protocol.problems import SettingsInvalid

EMBEDDED = "SmolLM2-135M-Instruct"
"""Model that is served without --model."""
FLAG = "--served-model-name"


def names_of(model: str, aliases: Sequence[str], *, default: bool) -> tuple[str, ...]:
    """Names by which clients may address `model`. Aliases are NAME=MODEL, or NAME for the default model."""
    named = [name for name, meant in map(_parted, aliases) if meant == model or (default and not meant)]
    return tuple(dict.fromkeys([*named, model]))


def require_names(models: Sequence[str], aliases: Sequence[str]) -> None:
    """Raises `SettingsInvalid` for a name that would have no effect. `models`: what --model says, in its order."""
    meant_by: dict[str, str] = {}
    for alias in aliases:
        name, meant = _parted(alias)
        model = models[0] if meant is None else meant
        if not name.strip():
            raise SettingsInvalid(f"{FLAG} {alias!r} has no name; give NAME, or NAME=MODEL", FLAG)
        if model not in models:
            raise SettingsInvalid(
                f"{FLAG} {alias}: {model!r} is none of --model ({', '.join(models)}); give NAME=MODEL with one of them, "
                "or NAME alone for the first",
                FLAG,
            )
        if meant_by.setdefault(name, model) != model:
            raise SettingsInvalid(f"{FLAG} {name} is given to two models; give each a name of its own", FLAG)


def _parted(alias: str) -> tuple[str, str | None]:
    """Split an alias into the name and its model; None: the default model."""
    name, given, model = alias.partition("=")
    return name, model if given else None
