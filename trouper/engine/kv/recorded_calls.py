"""Calls of recurrent layers, recorded in a pass and repeated over fewer tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import pairwise
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache

from trouper.engine.lora.row_adapters import RowAdapters, applied
from trouper.engine.passes.region import Ints
from trouper.workarounds.mlx_call_hooks import hook_calls

CACHE, MASK = "cache", "mask"
"""Of mlx-lm's layers."""


class RecurrentCache(ArraysCache):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.calls: list[RecordedCall] | None = None
        """Of innermost modules, in order; None: not recording."""
        self.reads_lengths = False

    @property
    def lengths(self) -> mx.array | None:
        """(n,) tokens of each row; None: no padding."""
        self.reads_lengths = True
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: mx.array | None) -> None:
        self._lengths = lengths

    def make_mask(self, N: int) -> mx.array | None:  # noqa: N803  The parameter's name is mlx-lm's.
        """(n, N) bool: tokens without padding."""
        reads = self.reads_lengths
        mask: mx.array | None = super().make_mask(N)
        self.reads_lengths = reads
        return mask

    def update_recurrent(
        self, index: int, length: int, update: Callable[[Any, int | None], tuple[Any, ...]]
    ) -> tuple[Any, Any]:
        """As mlx-vlm's: set a state to that after `length` tokens. Returns output and state."""
        del length  # Of a history of states, which is not kept.
        output, state = update(self.cache[index], None)[:2]
        self.cache[index] = state
        return output, state

    def update_window(
        self, index: int, source: mx.array, width: int, *, lengths: mx.array | None = None
    ) -> mx.array:
        """As mlx-vlm's: set a state to the last `width` of each row's own tokens. `source`: (n,
        width + tokens, ...). `lengths`: (n,) own tokens; None: all."""
        tokens = source.shape[1] - width
        if lengths is None:
            state = mx.contiguous(source[:, tokens:])
        else:
            places = mx.clip(lengths, 0, tokens)[:, None] + mx.arange(width)
            state = mx.take_along_axis(
                source, places.reshape(*places.shape, *[1] * (source.ndim - 2)), axis=1
            )
        self.cache[index] = state
        return state

    def advance(self, N: int) -> None:  # noqa: N803
        """Subtract the tokens of a pass."""
        if self._lengths is not None:
            self._lengths = self._lengths - N


# A layer's inputs are independent of later tokens, and a recorded call is repeated from the state
# before the pass; lazily, so only states are computed. A layer is the innermost module with the
# cache.
@attrs.frozen(eq=False)
class RecordedCall:
    """arguments: by name, without a mask; arrays are (n, width, ...) or (n, ...)."""

    module: nn.Module
    signature: inspect.Signature
    arguments: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the arguments, held while repeatable."""
        return sum(value.nbytes for value in self.arguments.values() if isinstance(value, mx.array))

    def repeat(self, states: RecurrentCache, picked: Picked) -> None:
        """Build the call over rows' first tokens; changes `states`."""
        arguments = {
            name: picked.of(value) if isinstance(value, mx.array) else value
            for name, value in self.arguments.items()
        }
        arguments[CACHE] = _replaced(arguments[CACHE], states)
        # A mask of padding. Attention's mask is of no use to a state.
        if MASK in self.signature.parameters:
            arguments[MASK] = states.make_mask(picked.width)
        bound = inspect.BoundArguments(self.signature, arguments)
        self.module(*bound.args, **bound.kwargs)


@attrs.frozen(eq=False)
class Picked:
    """rows: (m,) indices in a recorded pass; None: all `num_rows`. width: tokens in the repeated
    call, of `recorded_width`. counts: (m,) of the row's own tokens; None: all."""

    rows: Ints | None
    width: int
    counts: Ints | None
    num_rows: int
    recorded_width: int
    adapters: RowAdapters | None = None
    """Of these rows."""

    def of(self, array: mx.array) -> mx.array:
        """An argument's part: (m, width, ...), or (m, ...) without tokens."""
        if not array.ndim or array.shape[0] != self.num_rows:
            return array
        part = self.rows_of(array)
        return (
            part[:, : self.width]
            if part.ndim > 1 and part.shape[1] == self.recorded_width
            else part
        )

    def rows_of(self, array: mx.array) -> mx.array:
        return array if self.rows is None else array[mx.array(self.rows)]


def _replaced(value: Any, states: RecurrentCache) -> Any:
    """A repeated call's cache. Attention gets KV that nothing reads."""
    if isinstance(value, RecurrentCache):
        return states
    return [states if isinstance(each, RecurrentCache) else KVCache() for each in value]


def _recording(value: Any) -> list[RecurrentCache]:
    if isinstance(value, RecurrentCache):
        return [value] if value.calls is not None else []
    caches = getattr(value, "caches", ())
    return [view for each in caches for view in _recording(getattr(each, "view", None))]


def layers_with_cache(model: nn.Module) -> list[nn.Module]:
    kinds: list[tuple[nn.Module, Any]] = [
        (module, type(module)) for _, module in model.named_modules()
    ]
    return [module for module, kind in kinds if CACHE in _signature(kind).parameters]


@cache
def _signature(kind: Any) -> inspect.Signature:
    signature = inspect.signature(kind.__call__)
    return signature.replace(parameters=[*signature.parameters.values()][1:])


def recorded_calls(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    return hook_calls(modules, _record)


def _record(kind: Any, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call, and record in each cache without a nested module's record."""
    signature = _signature(kind)
    arguments = signature.bind(*args, **options).arguments
    caches = _recording(arguments.get(CACHE))
    before = [len(states.calls or ()) for states in caches]
    out = kind.__call__(module, *args, **options)
    for states, count in zip(caches, before, strict=True):
        if states.calls is not None and len(states.calls) == count:
            kept = {name: value for name, value in arguments.items() if name != MASK}
            states.calls.append(RecordedCall(module, signature, kept))
    return out


@attrs.frozen(eq=False)
class RecordedStates:
    """States before a pass, (n, ...) each, and later calls."""

    before: list[mx.array]
    calls: list[RecordedCall]
    reads_lengths: bool

    def after(self, picked: Picked) -> list[mx.array]:
        """Rows' states (m, ...) after their first tokens, possibly none."""
        states = RecurrentCache(len(self.before))
        states.cache = [picked.rows_of(mx.array(state)) for state in self.before]
        for call in self.calls if picked.width else ():
            if picked.counts is not None:
                states.lengths = mx.array(picked.counts)
            with applied(picked.adapters):
                call.repeat(states, picked)
        return list(states.cache)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.before) + sum(call.nbytes for call in self.calls)


PADDING_TRACE = 0.05
"""Relative difference that shows padding. Rounding makes up to 0.004."""


def keeps_padding_out(layers: Sequence[RecordedStates], recording: Recording) -> bool:
    """Try whether padding stays out of states. Waits for the device."""
    # One token from zeros with padding against one alone. nemotron_h reads lengths, but not in its
    # scan.
    if not all(layer.reads_lengths for layer in layers):
        return False
    first, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    num_rows, width = recording.num_rows, recording.width
    parts = list[tuple[mx.array, mx.array]]()
    for layer in layers:
        empty = attrs.evolve(layer, before=[mx.zeros_like(state) for state in layer.before])
        padded, alone = (
            empty.after(Picked(first, each, counts, num_rows, width))
            for each, counts in ((width, one), (1, None))
        )
        parts += zip(padded, alone, strict=True)
    return bool(mx.all(mx.stack([_equal(*pair) for pair in parts])).item())


def _equal(state: mx.array, other: mx.array) -> mx.array:
    error, reference = (part.astype(mx.float32).square().sum() for part in (state - other, other))
    return error <= PADDING_TRACE**2 * reference


Partition = Callable[[Sequence[int]], list[range]]


def each_alone(counts: Sequence[int]) -> list[range]:
    """Partition numbers of tokens into passes without padding."""
    starts = np.unique(counts, return_index=True)[1].tolist()
    return [range(start, stop) for start, stop in pairwise([*starts, len(counts)])]


@attrs.frozen
class Recording:
    num_rows: int
    width: int
    adapters: RowAdapters | None = None

    def picked(
        self, rows: Ints, counts: Ints, partition: Partition = each_alone
    ) -> Iterator[Picked]:
        """Group ascending rows (m,) for states after counts[i] tokens each."""
        order = np.argsort(counts, kind="stable")
        for group in partition(counts[order].tolist()):
            indices = np.sort(order[group.start : group.stop])
            of_group, width = counts[indices], int(counts[indices].max())
            yield Picked(
                rows=None if len(group) == self.num_rows else rows[indices],
                width=width,
                counts=None if (of_group == width).all() else of_group,
                num_rows=self.num_rows,
                recorded_width=self.width,
                adapters=None if self.adapters is None else self.adapters.picked(rows[indices]),
            )
