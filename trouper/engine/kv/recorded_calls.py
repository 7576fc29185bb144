"""Calls of the modules that change recurrent state: recorded in one pass, and repeated over fewer of its tokens.

The state after a pass is known, those after its earlier tokens are not. But what a layer adds to its state follows from the
hidden states that it gets, and these are right at each token whatever comes after it. So a layer's call is recorded
with its arguments, and repeated from the state before on the first tokens only. MLX is lazy: what is computed are the new
states, not the layer's output, and neither attention, experts nor the model's head. A layer is its mixer here: the innermost
module that gets the cache.

mlx-lm is not patched for this. While calls are recorded, the modules of this one model have subclasses of their classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache

from trouper.engine.kv.region import Ints

CACHE, MASK = "cache", "mask"
"""Names of parameters of mlx-lm's layers."""


class RecurrentCache(ArraysCache):
    """mlx-lm's cache of recurrent states, with the calls that got it."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.calls: list[Call] | None = None
        """Calls of the innermost modules, in order; None: they are not recorded."""


@attrs.frozen(eq=False)
class Call:
    """A call of a module that changes the states of a cache. arguments: by name; arrays are (n, width, ...) or (n, ...)."""

    module: nn.Module
    signature: inspect.Signature
    arguments: dict[str, Any]

    def repeat(self, states: RecurrentCache, picked: Picked) -> None:
        """Build the call over the first tokens of some rows, whose `states` it changes."""
        arguments = {name: self._changed(name, value, states, picked) for name, value in self.arguments.items()}
        bound = inspect.BoundArguments(self.signature, arguments)  # Any dict is in order.
        self.module(*bound.args, **bound.kwargs)

    def _changed(self, name: str, value: Any, states: RecurrentCache, picked: Picked) -> Any:
        if name == CACHE:
            return _replaced(value, states)
        if name == MASK:  # A mask of padding. Attention's mask is of no use to a state.
            return states.make_mask(picked.width)
        return picked.of(value) if isinstance(value, mx.array) else value


@attrs.frozen(eq=False)
class Picked:
    """Some rows of a recorded pass, and their first tokens. rows: (m,) indices; None: all of the pass's `num_rows` rows.

    width: number of tokens that a repeated call runs, of the `recorded_width` that it was recorded with.
    """

    rows: Ints | None
    width: int
    num_rows: int
    recorded_width: int

    def of(self, array: mx.array) -> mx.array:
        """The part of an argument: (m, width, ...), or (m, ...) of one without tokens."""
        if not array.ndim or array.shape[0] != self.num_rows:
            return array
        part = self.rows_of(array)
        return part[:, : self.width] if part.ndim > 1 and part.shape[1] == self.recorded_width else part

    def rows_of(self, array: mx.array) -> mx.array:
        return array if self.rows is None else array[mx.array(self.rows)]


def _replaced(value: Any, states: RecurrentCache) -> Any:
    """The cache of a repeated call. A layer whose attention has state, too, gets KV that nobody needs: what it adds to the state
    is known before it attends."""
    if isinstance(value, RecurrentCache):
        return states
    return [states if isinstance(each, RecurrentCache) else KVCache() for each in value]


def _recording(value: Any) -> list[RecurrentCache]:
    """Find caches that record, in the cache of a layer or in its list of caches."""
    if isinstance(value, RecurrentCache):
        return [value] if value.calls is not None else []
    caches = getattr(value, "caches", ())
    return [view for each in caches for view in _recording(getattr(each, "view", None))]


def layers_with_cache(model: nn.Module) -> list[nn.Module]:
    """Find all modules whose calls get a cache."""
    kinds: list[tuple[nn.Module, Any]] = [(module, type(module)) for _, module in model.named_modules()]
    return [module for module, kind in kinds if CACHE in _signature(kind).parameters]


@cache
def _signature(kind: Any) -> inspect.Signature:
    signature = inspect.signature(kind.__call__)
    return signature.replace(parameters=[*signature.parameters.values()][1:])


@contextmanager
def recorded_calls(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Record the calls of these modules in the caches that they get."""
    kinds: list[Any] = [type(module) for module in modules]
    try:
        for module, kind in zip(modules, kinds, strict=True):
            module.__class__ = _recorder(kind)
        yield
    finally:
        for module, kind in zip(modules, kinds, strict=True):
            module.__class__ = kind


@cache
def _recorder(kind: Any) -> type[nn.Module]:
    """Make a subclass whose calls are recorded by each cache that has recorded none within them: of nested modules that get
    a cache, the innermost one."""
    signature = _signature(kind)

    def call(self: nn.Module, *args: Any, **options: Any) -> Any:
        arguments = signature.bind(*args, **options).arguments
        caches = _recording(arguments.get(CACHE))
        before = [len(states.calls or ()) for states in caches]
        out = kind.__call__(self, *args, **options)
        for states, count in zip(caches, before, strict=True):
            if states.calls is not None and len(states.calls) == count:
                states.calls.append(Call(self, signature, dict(arguments)))
        return out

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


@attrs.frozen(eq=False)
class RecordedStates:
    """States of one cache before a pass, (n, ...) each, and the calls that changed them."""

    before: list[mx.array]
    calls: list[Call]

    def after(self, picked: Picked) -> list[mx.array]:
        """Build the states (m, ...) of rows after their first `picked.width` tokens, which may be none."""
        states = RecurrentCache(len(self.before))
        states.cache = [picked.rows_of(mx.array(state)) for state in self.before]
        for call in self.calls if picked.width else ():
            call.repeat(states, picked)
        return list(states.cache)

    @property
    def nbytes(self) -> int:
        """Bytes of the states. What the calls got is shared with the pass or smaller."""
        return sum(state.nbytes for state in self.before)


def picked_groups(rows: Ints, counts: Ints, num_rows: int, width: int) -> Iterator[Picked]:
    """Group rows by the number of tokens after which their states are wanted: without padding, which some models take into their
    states, each number has calls of its own. rows: (m,) ascending; counts: (m,)."""
    for count in np.unique(counts):
        group = rows[counts == count]
        yield Picked(None if len(group) == num_rows else group, int(count), num_rows, width)
