"""The slots and lengths of one forward pass, shared by every layer's cache."""

from __future__ import annotations

from functools import cached_property

import attrs
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trouper.engine.lora.row_adapters import RowAdapters
from trouper.engine.passes.media_pass import MediaPass
from trouper.engine.passes.pass_shapes import EXACT, Shapes

Ints = NDArray[np.int32]
# Arrays that are properties.
PROPERTIES = ("offset", "after", "positions", "clamped_positions", "last")
# Name of the rows' adapter indices.
ADAPTERS = "adapters"
Name = str | tuple[int, int, int]
"""Name of an array: one of `PROPERTIES`, `ADAPTERS`, or arguments of `flat_indices`."""


@attrs.frozen(eq=False)
class Reach:
    """Tokens of images that attend to later ones (`MediaSpan.atomic`)."""

    last: Ints
    """(n, width): position of the last key to which each token attends; its own, except in
    images."""
    in_full_layers: bool
    """Whether layers without a window have it, too."""


class Region:
    """Slots [start, stop) in a pass of `width` tokens a row. Each bank has a region; several have
    one more, of all rows, whose `start` and `stop` are no slots."""

    media: MediaPass | None = None
    """Images, in the region of all rows. None: the pass has none."""
    reach: Reach | None = None
    adapters: RowAdapters | None = None
    """Adapters, in the region of all rows. None: no row has one."""

    def __init__(
        self,
        start: int,
        lengths: Ints,
        counts: Ints,
        width: int,
        shapes: Shapes = EXACT,
        *,
        singly: bool = False,
        deltas: Ints | None = None,
        reach: Reach | None = None,
    ) -> None:
        """lengths: (n,) tokens in KV before the pass. counts: (n,) own tokens of each row. deltas:
        (n,) positions beyond the tokens in KV, behind images with M-RoPE; None: none. reach: of
        tokens that attend to later ones; None: none do. singly: the tokens are drafts, each
        computed as if fed alone."""
        self.singly, self.reach = singly, reach
        self._rope_offsets = lengths if deltas is None else lengths + deltas
        self.start, self.stop, self.width = start, start + len(lengths), width
        # On the host, to spare waits. Tokens that are not a row's own are padding on the right,
        # never attended to and overwritten later.
        self.lengths, self.counts = lengths, counts
        # Tokens of the longest row after the pass, with padding; buffers must hold `room`.
        self.longest = self.room = int(lengths.max()) + width
        # All rows are equally long: a causal mask is right, also for fewer own tokens.
        self.level = bool((lengths == lengths[0]).all())
        # The mask is "causal", or none for a single token; else an array over `keys` positions.
        spares_no_shape = width == 1 or not shapes.rounded or not lengths[0]
        mask_is_too_large = width * self.longest > shapes.mask_elements
        needs_no_array = mask_is_too_large or shapes.planned(self.longest, width)
        self.causal = self.level and (spares_no_shape or needs_no_array)
        if reach is not None and reach.in_full_layers:
            self.causal = False
        self.keys = self.longest if self.causal or width == 1 else shapes.keys(self.longest)
        # Attention gets gapless copies of keys and values: the device prepares each length and
        # stride.
        self.copied = self.level and shapes.copied(width, self.keys)
        # Attention gets whole buffers without a mask (`decode_attention.py`).
        fills_first_slots = not start and (width == 1 or singly)
        by_length = shapes.by_length(len(lengths), self.longest, width)
        self.by_length = fills_first_slots and reach is None and by_length
        # The same, for chunks of prompts in any slots (`prefill_attention.py`).
        tiled = shapes.tiled(len(lengths), self.longest, width)
        self.tiled = tiled and reach is None and not self.by_length
        self._flat_indices: dict[tuple[int, int, int], mx.array] = {}

    @cached_property
    def offset(self) -> mx.array:
        """(n,) int32: rope offset of each row."""
        return mx.array(self._rope_offsets)

    @cached_property
    def after(self) -> mx.array:
        """(n,) int32: tokens in KV after the pass, for attention by lengths; also the rope offset
        without deltas."""
        return mx.array(self.lengths + self.width)

    @cached_property
    def slots_and_lengths(self) -> mx.array:
        """(n, 2) int32: slot, and tokens in KV before the pass."""
        slots = np.arange(self.start, self.stop, dtype=np.int32)
        return mx.array(np.stack([slots, self.lengths], axis=1))

    @cached_property
    def indices_and_lengths(self) -> mx.array:
        """(n, 2) int32: `slots_and_lengths` for arrays of these rows alone."""
        return self.slots_and_lengths - mx.array([self.start, 0], mx.int32)

    @cached_property
    def positions(self) -> mx.array:
        """(n, width) int32: absolute positions."""
        return mx.array(self.lengths[:, None] + np.arange(self.width, dtype=np.int32))

    @cached_property
    def clamped_positions(self) -> mx.array:
        """(n, width) int32: `positions`, with padding at the row's last token, to attend to some
        key."""
        steps = np.minimum(np.arange(self.width), np.maximum(self.counts, 1)[:, None] - 1)
        return mx.array((self.lengths[:, None] + steps).astype(np.int32))

    @cached_property
    def last(self) -> mx.array:
        """(n,) int32: position of each row's last token after the pass, or of the first padding."""
        return mx.array((self.lengths + np.maximum(self.counts, 1) - 1).astype(np.int32))

    def last_keys(self, queries: mx.array, *, full_layer: bool = False) -> mx.array:
        """(n, width, 1) int32: position of the last key to which each query attends. `queries`:
        their positions, of the same shape. `full_layer`: the layer has no window."""
        if self.reach is None or (full_layer and not self.reach.in_full_layers):
            return queries
        return mx.array(self.reach.last)[:, :, None]

    def mask(self, window: int | None = None) -> mx.array:
        """(n, width, keys) bool: True where a query attends to a key, at most `window` - 1
        positions before."""
        query, key = self.positions[:, :, None], mx.arange(self.keys, dtype=mx.int32)
        mask = key <= self.last_keys(query, full_layer=window is None)
        return mask if window is None else mask & (key > query - window)

    def flat_indices(self, heads: int, tokens: int, ring: int = 0) -> mx.array:
        """(n * heads * width,) uint32: index of each token and head in a buffer (slots, heads,
        tokens, dim) flattened to rows of `dim`. `ring`: length of each slot's ring; 0: none."""
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
        adapters = () if self.adapters is None else (ADAPTERS,)
        return [
            *(name for name in PROPERTIES if name in self.__dict__),
            *adapters,
            *self._flat_indices,
        ]

    def array(self, name: Name) -> mx.array:
        if name == ADAPTERS:
            assert self.adapters is not None, "passes with adapters have structures of their own"
            return self.adapters.indices
        return getattr(self, name) if isinstance(name, str) else self.flat_indices(*name)

    def _ring_positions(self, ring: int) -> Ints:
        # (n, width): ring index of each token; `ring` (one past the end) for tokens that are not
        # kept.
        steps = np.arange(self.width, dtype=np.int32)
        kept = (steps < self.counts[:, None]) & (steps >= self.counts[:, None] - ring)
        return np.where(kept, (self.lengths[:, None] + steps) % ring, ring).astype(np.int32)


def padded(array: mx.array, width: int) -> mx.array:
    """Pad (n, any) or (n, any, dim) to `width`."""
    missing = width - array.shape[1]
    return mx.pad(array, [(0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)]) if missing else array
