"""Images in the messages of a model that reads text only: a placeholder takes the position of
each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

PLACEHOLDER = "[An image was sent here. This model reads text only.]"
"""The text that the model reads. It is the same for every image and in every turn, so that the
prefix stays cached."""


def names_of(parts: Iterable[Any], kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the name that the API has for a kind of parts if one of these parts is of it."""
    return (
        (str(kind.__struct_config__.tag),) if any(isinstance(part, kind) for part in parts) else ()
    )
