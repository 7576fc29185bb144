"""Cache classes of other packages that behave as mlx-lm's, and hence may have slots."""

from __future__ import annotations

from typing import Any

_ALIKE: dict[type, type] = {}


def treat_alike(kind: type, counterpart: type) -> None:
    """Give a class the slots of mlx-lm's `counterpart`. The self-check finds wrong answers."""
    _ALIKE[kind] = counterpart


def kind_of(cache: Any) -> type:
    """The class of a cache, or the counterpart in mlx-lm."""
    return _ALIKE.get(type(cache), type(cache))
