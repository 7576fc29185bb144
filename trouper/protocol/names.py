"""What clients may call a model."""

from __future__ import annotations

from collections.abc import Sequence

from trouper.protocol.errors import SettingsInvalid

EMBEDDED = "SmolLM2-135M-Instruct"
"""The model without --model."""
FLAG = "--served-model-name"


def require_names(models: Sequence[str], aliases: Sequence[str]) -> None:
    """Raises `SettingsInvalid` for a name that would have no effect. `models`: what --model says, in its order."""
    meant_by: dict[str, str] = {}
    for alias in aliases:
        name, given, model = alias.partition("=")
        model = model if given else models[0]
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
