"""Evaluation of lazy arrays. MLX updates a slot buffer in place only while nothing else refers to
the buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from trouper.engine.platform.device import is_cpu


def start_eval(states: list[mx.array]) -> mx.array:
    """Start a prefill's evaluation. Returns a copied element: holding a buffer would make its next
    update a copy."""
    done = mx.array(0) + states[-1].reshape(-1)[:1].astype(mx.float32)
    mx.async_eval(states, done)
    return done


def finish_or_start(arrays: Sequence[mx.array]) -> None:
    """Evaluate arrays that read slot buffers, before the buffers change.

    On a CPU wait, almost for free; elsewhere only start, so steps overlap.
    """
    (mx.eval if is_cpu() else mx.async_eval)(arrays)


def copied(views: Iterable[mx.array]) -> list[mx.array]:
    """Return evaluated copies: an unfinished read would make the next write copy the buffer."""
    copies = [mx.contiguous(view) for view in views]
    mx.eval(copies)
    return copies
