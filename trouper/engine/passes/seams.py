"""Exchange of hidden states between the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import mlx.core as mx
from mlx import nn


class Seams:
    """Exchanges hidden states with the neighbours, once a pass and direction."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group
        self._exchanged: list[mx.array] = []

    def receive(self, like: mx.array) -> mx.array:
        """Lazy; (n, width, dim) as `like`."""
        received = mx.distributed.recv_like(like, self._group.rank() + 1, group=self._group)
        self._exchanged.append(received)
        return received

    def send(self, hidden: mx.array, like: mx.array) -> mx.array:
        """Lazy; returns `hidden`. Raises `ValueError` if it is not what the next rank expects."""
        if (hidden.shape, hidden.dtype) != (like.shape, like.dtype):
            raise ValueError("its layers return other hidden states than they get")
        sent = mx.distributed.send(hidden, self._group.rank() - 1, group=self._group)
        self._exchanged.append(sent)
        return sent

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Start what the pass within receives and sends."""
        # A receive has no inputs, and KV depends on no send: several passes in one graph could be
        # paired wrongly. Passes that are only built exchange nothing.
        self._exchanged.clear()
        yield
        mx.async_eval(self._exchanged)
        self._exchanged.clear()


def seams_of(model: nn.Module) -> Seams | None:
    """None: this process has all layers."""
    return getattr(model, "seams", None)


def exchanging(model: nn.Module) -> AbstractContextManager[None]:
    """For each pass that is evaluated."""
    seams = seams_of(model)
    return nullcontext() if seams is None else seams.exchanging()
