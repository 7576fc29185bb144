"""The slots and row lengths of one forward pass: computed once, shared by every layer's cache."""

from __future__ import annotations

from functools import cached_property

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trouper.engine.kv.pass_shapes import EXACT, Shapes
from trouper.engine.lora.row_adapters import RowAdapters

Ints = NDArray[np.int32]
PROPERTIES = ("offset", "after", "positions", "clamped_positions", "last")
"""Arrays of a region that are properties."""
ADAPTERS = "adapters"
"""The name of the indices of the rows' adapters."""
Name = str | tuple[int, int, int]
"""What tells apart the arrays of a region: one of `PROPERTIES`, `ADAPTERS`, or the arguments of
`flat_indices`."""


class Region:
    """Slots [start, stop) in one forward pass of `width` tokens a row. Each bank of the pass has a
    region; if there are several, one more has the rows of all, whose `start` and `stop` are no
    slots.

    lengths: (n,) tokens that each row's KV holds before the pass. counts: (n,) how many of the
    `width` tokens are the row's own; the others are padding on the right, whose KV is never
    attended to and is overwritten later. Both are on the host, so that shapes and masks need no
    wait for the device.

    longest: tokens of the longest row after the pass, if its padding counts. room: number of tokens
    that buffers must hold. keys: number of key positions that attention reads.

    level: all rows are equally long, so that a causal mask is right, also where some rows run fewer
    tokens: their padding lies behind. causal: attention gets "causal" as its mask, or none for a
    single token; else an array over `keys` positions of each row.

    copied: attention gets copies of keys and values without gaps, since the device prepares each
    length *and stride*, and strides are those of the row's buffer. A copy of 60,000 tokens takes
    0.1 ms a layer on an H200, a preparation 40 ms.

    by_length: the device has a kernel for few tokens of each row that knows the rows' lengths
    (`decode_attention.py`), so attention gets whole buffers and needs no mask.

    singly: the tokens are drafts, each of which must come out as if it had been fed alone.
    """

    adapters: RowAdapters | None = None
    """The adapters of the rows, in the region that has all of them. None: no row has one."""

    def __init__(
        self,
        start: int,
        lengths: Ints,
        counts: Ints,
        width: int,
        shapes: Shapes = EXACT,
        *,
        singly: bool = False,
    ) -> None:
        self.singly = singly
        self.start, self.stop, self.width = start, start + len(lengths), width
        self.lengths, self.counts = lengths, counts
        self.longest = self.room = int(lengths.max()) + width
        self.level = bool((lengths == lengths[0]).all())
        self.causal = self.level and (
            width == 1
            or not shapes.rounded
            or not lengths[0]
            or width * self.longest > shapes.mask_elements
        )
        self.keys = self.longest if self.causal or width == 1 else shapes.keys(self.longest)
        self.copied = self.level and shapes.copied(width, self.keys)
        self.by_length = (
            not start
            and (width == 1 or singly)
            and shapes.by_length(len(lengths), self.longest, width)
        )
        self._flat_indices: dict[tuple[int, int, int], mx.array] = {}

    @cached_property
    def offset(self) -> mx.array:
        """(n,) int32: the rope offset of each row."""
        return mx.array(self.lengths)

    @cached_property
    def after(self) -> mx.array:
        """(n,) int32: the rope offset of each row after the pass."""
        return mx.array(self.lengths + self.width)

    @cached_property
    def positions(self) -> mx.array:
        """(n, width) int32: the absolute position of each token."""
        return mx.array(self.lengths[:, None] + np.arange(self.width, dtype=np.int32))

    @cached_property
    def clamped_positions(self) -> mx.array:
        """(n, width) int32: `positions`, but padding has the position of the row's last token, so
        that it attends to some key."""
        steps = np.minimum(np.arange(self.width), np.maximum(self.counts, 1)[:, None] - 1)
        return mx.array((self.lengths[:, None] + steps).astype(np.int32))

    @cached_property
    def last(self) -> mx.array:
        """(n,) int32: the position of each row's last token after the pass, or of its first padding
        if it has no token."""
        return mx.array((self.lengths + np.maximum(self.counts, 1) - 1).astype(np.int32))

    def mask(self, window: int | None = None) -> mx.array:
        """(n, width, keys) bool: True where a query attends to a key, which is at most `window` - 1
        positions before it."""
        query, key = self.positions[:, :, None], mx.arange(self.keys, dtype=mx.int32)
        mask = key <= query
        return mask if window is None else mask & (key > query - window)

    def flat_indices(self, heads: int, tokens: int, ring: int = 0) -> mx.array:
        """(n * heads * width,) uint32: index of each token's part of each head in a buffer (slots,
        heads, tokens, dim) that is flattened to rows of `dim`. `ring`: length of the ring that each
        slot is; 0 for none. Buffers of the same sizes share the indices, so they are computed
        once."""
        key = heads, tokens, ring
        if key not in self._flat_indices:
            positions = (
                self._ring_positions(ring)
                if ring
                else self.lengths[:, None] + np.arange(self.width)
            )
            slots = (
                np.arange(self.start, self.stop)[:, None, None] * heads + np.arange(heads)[:, None]
            )
            self._flat_indices[key] = mx.array(
                (slots * tokens + positions[:, None]).ravel().astype(np.uint32)
            )
        return self._flat_indices[key]

    def arrays_read(self) -> list[Name]:
        """Names of the arrays that were read."""
        adapters = () if self.adapters is None else (ADAPTERS,)
        return [
            *(name for name in PROPERTIES if name in self.__dict__),
            *adapters,
            *self._flat_indices,
        ]

    def array(self, name: Name) -> mx.array:
        """The array of that name."""
        if name == ADAPTERS:
            assert self.adapters is not None, "passes with adapters have structures of their own"
            return self.adapters.indices
        return getattr(self, name) if isinstance(name, str) else self.flat_indices(*name)

    def _ring_positions(self, ring: int) -> Ints:
        """(n, width): ring index of each token; `ring` itself (one past the end) for tokens that
        are not kept."""
        steps = np.arange(self.width, dtype=np.int32)
        kept = (steps < self.counts[:, None]) & (steps >= self.counts[:, None] - ring)
        return np.where(kept, (self.lengths[:, None] + steps) % ring, ring).astype(np.int32)


def padded(array: mx.array, width: int) -> mx.array:
    """Pad tokens (n, any), or what belongs to each (n, any, dim), to (n, width) or (n, width,
    dim)."""
    missing = width - array.shape[1]
    return mx.pad(array, [(0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)]) if missing else array
