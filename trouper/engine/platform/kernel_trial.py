"""The trial of a kernel of ours before it is used: a device may have fewer registers than it needs, or a compiler that refuses it."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from trouper.engine.platform.error_text import line_of


def fault_of(errors: Callable[[], mx.array], bound: float) -> str:
    """Why a kernel cannot be used; "" if it can: nothing raises, and no error of its results, of any shape, reaches the bound."""
    try:
        right = mx.abs(errors()).max().item() < bound  # type: ignore[operator]
    except Exception as error:  # noqa: BLE001 - whatever the device's compiler or driver says, there is another way
        return line_of(error)
    return "" if right else "its results are wrong"
