"""Slots for sliding windows: each slot is a ring of the row's last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from trouper.engine.adaptations.row_offsets import USUAL, Traits
from trouper.engine.kv.slot_cache import Room, SlotCache

# More tokens than any row has.
ANY_LENGTH = 2**31


def ring_slack(draft_tokens: int) -> int:
    """Tokens of a ring beyond the window, with at most `draft_tokens` drafts a step."""
    # Drafts overwrite the oldest tokens, and a snapshot may be wanted of two steps ago.
    return 3 * (draft_tokens + 1)


def ring_length(window: int, slack: int) -> int:
    """Room of a row's buffers: window, `slack`, and one token that is not kept."""
    return window + slack + 1


class RingSlots(SlotCache):
    """The counterpart of mlx-lm's RotatingKVCache. `slack`: tokens beyond the window."""

    # Position p is stored at p % ring; one more index takes tokens that are not kept. A pass of at
    # most slack + 1 tokens a row overwrites no key that its first token attends to, hence is
    # written first. Rejected drafts leave the window intact: they overwrote tokens out of reach.

    def __init__(self, window: int, slack: int = 0, traits: Traits = USUAL) -> None:
        super().__init__(traits)
        self.window = window
        self.ring = window + slack
        self._fetched: tuple[mx.array, mx.array] | None = None

    def finish(self) -> None:
        super().finish()
        self._fetched = None

    def _capacity(self, tokens: int) -> int:  # noqa: ARG002  A ring has a fixed length.
        return ring_length(self.ring, 0)

    def _used_tokens(self, tokens: int) -> int:
        return min(tokens, self.ring)

    @property
    def room(self) -> Room:
        """Rings have room for rows of any length."""
        return super().room[0], ANY_LENGTH

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write the pass's tokens. Returns the ring afterwards for few tokens, else the ring
        before, and the new tokens."""
        region, parts = self.region, (keys, values)
        self.reserve(parts, region.stop, 0)
        if not self._fits:
            before_keys, before_values = map(self._rows_of, self.buffers)
            self._fetched = (
                mx.concatenate([before_keys, keys], 2),
                mx.concatenate([before_values, values], 2),
            )
        self._scatter(parts, self.ring)
        self._updated = True
        return self.keys_and_values()

    @property
    def _fits(self) -> bool:
        # Whether the tokens can be written before attention.
        return self.region.width <= 1 + self.ring - self.window

    def keys_and_values(self) -> tuple[Any, Any]:
        """(n, heads, keys, dim): the ring, or for a wide pass the ring before and the new tokens.
        For kernels, a `WholeBuffer`."""
        keys, values = self._fetched or self.buffers
        return self._for_attention(keys, values, gathered=self._fetched is not None)

    @property
    def _for_kernel(self) -> bool:
        # With several tokens a row the kernel for decoding takes padding for kept tokens.
        return self.region.tiled or (self.region.by_length and self.region.width == 1)

    def snapshot(self, slot: int, length: int) -> list[mx.array]:
        """Copy (last min(length, window) tokens, heads, dim) of each buffer, oldest first. At most
        `slack` tokens may have followed."""
        indices = self._ring_indices(length)
        return [buffer[mx.full(indices.shape, slot), :, indices] for buffer in self.buffers]

    def restore(self, slot: int, length: int, parts: Sequence[mx.array]) -> None:
        """Write the snapshot of a row of `length` tokens."""
        indices = self._ring_indices(length)
        self.reserve([part.transpose(1, 0, 2)[None] for part in parts], slot + 1, 0)
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer[mx.full(indices.shape, slot), :, indices] = part

    def _ring_indices(self, length: int) -> mx.array:
        # (kept,) int32: ring indices of a row's newest tokens.
        return mx.array(
            (np.arange(max(length - self.window, 0), length) % self.ring).astype(np.int32)
        )

    def _ring_tokens(self) -> int:
        # Number of ring indices in use.
        return min(self.ring, self.region.longest - (0 if self._fits else self.region.width))

    def _rows_of(self, buffer: mx.array) -> mx.array:
        # (n, heads, ring tokens, dim) view of the pass's rows.
        return buffer[self.region.start : self.region.stop, :, : self._ring_tokens()]

    def make_mask(
        self,
        width: int,  # noqa: ARG002  The region has the width.
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | None:
        """(n, 1, width, keys) bool: True where a query attends to a key, keys in ring order. None
        by lengths."""
        needs_array = self._needs_array(self.region.width, return_array)
        if self._for_kernel and not needs_array and window_size in (None, self.window):
            return None
        return self._mask(window_size)

    def _mask(self, window: int | None = None) -> mx.array:
        return self._shape_mask(self._visible(min(window or self.window, self.window)))

    def _visible(self, window: int) -> mx.array:
        # (n, width, keys) bool: the mask of `make_mask`.
        index = mx.arange(self._ring_tokens(), dtype=mx.int32)

        def first(query: mx.array) -> mx.array:
            # From a query's position to the first key's.
            return mx.maximum(query - (window - 1), 0)

        if self._fits:
            query, last = self.region.clamped_positions[:, :, None], self.region.last[:, None, None]
            position = last - (last - index) % self.ring
            return (position >= first(query)) & (position <= self.region.last_keys(query))
        query, last = self.region.positions[:, :, None], self.region.offset[:, None, None] - 1
        position = last - (last - index) % self.ring
        key = self.region.positions[:, None, :]
        last_keys = self.region.last_keys(query)
        before, new = position >= first(query), (key <= last_keys) & (key >= first(query))
        return mx.concatenate([before, new], axis=-1)
