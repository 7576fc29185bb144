"""Kinds of caches: classes of other packages that behave as one of mlx-lm's, whose rows may then
have slots."""

from __future__ import annotations

from typing import Any

_ALIKE: dict[type, type] = {}


def treat_alike(kind: type, counterpart: type) -> None:
    """Give caches of a class the slots of one of mlx-lm's classes. The self-check finds whether
    answers are then right."""
    _ALIKE[kind] = counterpart


def kind_of(cache: Any) -> type:
    """Return the class of a cache, or mlx-lm's class that it is treated as."""
    return _ALIKE.get(type(cache), type(cache))
