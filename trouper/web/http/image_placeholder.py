"""A placeholder for images, for models that read text only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

PLACEHOLDER = "[An image was sent here. This model reads text only.]"
"""The same for every image and turn: the prefix stays cached."""


def names_of(parts: Iterable[Any], kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the API's name of `kind` if one of these parts has that kind."""
    return (
        (str(kind.__struct_config__.tag),) if any(isinstance(part, kind) for part in parts) else ()
    )
