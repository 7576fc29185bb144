"""Slots for sliding windows: each slot is a ring of the row's last tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from trouper.engine.adaptations.cache_traits import USUAL, Traits
from trouper.engine.kv.buffer_shapes import Room
from trouper.engine.kv.decode_attention import WholeBuffer
from trouper.engine.kv.slot_cache import SlotCache

ANY_LENGTH = 2**31
"""More tokens than a row has."""


def ring_slack(draft_tokens: int) -> int:
    """Number of tokens that rings hold beyond their window, where a step drafts at most
    `draft_tokens`. A step's drafts, accepted or rejected, overwrite the oldest tokens; and a
    snapshot may be needed of the row's state two such steps ago, when its answer had ended and one
    more step was planned."""
    return 3 * (draft_tokens + 1)


def ring_length(window: int, slack: int) -> int:
    """Number of tokens that the buffers of a row have room for: its window, `slack` tokens more,
    and one that is not kept."""
    return window + slack + 1


class RingSlots(SlotCache):
    """Slots for attention over the last `window` tokens: the counterpart of mlx-lm's
    RotatingKVCache.

    The token at position p is stored at index p % ring. One more index behind the ring takes tokens
    that are not kept.

    `slack` is the number of tokens that the ring holds beyond the window. A pass of at most slack +
    1 tokens a row overwrites no key that its first token attends to, so all its tokens are written
    first. Rejecting draft tokens afterwards leaves the window of the row's last tokens intact: the
    drafts overwrote tokens that no window reaches any more.
    """

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
        """Write the pass's tokens. Returns the ring after the write if the pass has few tokens,
        else the ring before the write followed by the new tokens."""
        region, parts = self.region, (keys, values)
        self.reserve(parts, region.stop, 0)
        if not self._fits:
            before_keys, before_values = self._ring_contents()
            self._fetched = (
                mx.concatenate([before_keys, keys], 2),
                mx.concatenate([before_values, values], 2),
            )
        self._scatter(parts, self.ring)
        self._updated = True
        return self.keys_and_values()

    @property
    def _fits(self) -> bool:
        """Whether the pass's tokens can be written before any of them attends to the ring."""
        return self.region.width <= 1 + self.ring - self.window

    def keys_and_values(self) -> tuple[Any, Any]:
        """(n, heads, keys, dim): the ring, or for a wide pass the ring before it and the new
        tokens. Where attention is by lengths, the whole buffers."""
        if self._by_length:
            return self._for_kernel(self.buffers[0]), self._for_kernel(self.buffers[1])
        return self._fetched or self._ring_contents()

    @property
    def _by_length(self) -> bool:
        """Whether attention by lengths knows which of the ring's tokens are visible: padding behind
        drafts is not among them."""
        return self.region.by_length and self.region.width == 1

    def _for_kernel(self, buffer: mx.array) -> WholeBuffer:
        view, visible = partial(self._view, buffer), partial(self._visible, self.window)
        return WholeBuffer(buffer, self.region, view, visible, ring=self.ring, window=self.window)

    def snapshot(self, slot: int, length: int) -> list[mx.array]:
        """Copy (last min(length, window) tokens, heads, dim) of each buffer, oldest first. At most
        `slack` tokens after `length` may have been written since."""
        indices = self._ring_indices(length)
        return [buffer[mx.full(indices.shape, slot), :, indices] for buffer in self.buffers]

    def restore(self, slot: int, length: int, parts: Sequence[mx.array]) -> None:
        """Write the snapshot of a row of `length` tokens."""
        indices = self._ring_indices(length)
        self.reserve([part.transpose(1, 0, 2)[None] for part in parts], slot + 1, 0)
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer[mx.full(indices.shape, slot), :, indices] = part

    def _ring_indices(self, length: int) -> mx.array:
        """(kept,) int32: ring indices of the newest tokens of a row."""
        return mx.array(
            (np.arange(max(length - self.window, 0), length) % self.ring).astype(np.int32)
        )

    def _ring_tokens(self) -> int:
        """Number of ring indices that any row of the region may use."""
        return min(self.ring, self.region.longest - (0 if self._fits else self.region.width))

    def _ring_contents(self) -> tuple[mx.array, mx.array]:
        keys, values = map(self._view, self.buffers)
        return keys, values

    def _view(self, buffer: mx.array) -> mx.array:
        """(n, heads, ring tokens, dim) view of the rows of the pass."""
        return buffer[self.region.start : self.region.stop, :, : self._ring_tokens()]

    def make_mask(
        self,
        width: int,  # noqa: ARG002  The region has the width.
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | None:
        """(n, 1, width, keys) bool: True where a query attends to a key. Keys are in the order of
        the ring, not of positions. None where attention is by lengths."""
        if self._by_length and not return_array and window_size in (None, self.window):
            return None
        return self._shape_mask(self._visible(window_size or self.window))

    def _visible(self, window: int) -> mx.array:
        """(n, width, keys) bool: the mask of `make_mask`."""
        index = mx.arange(self._ring_tokens(), dtype=mx.int32)
        first = self._first_visible(window)
        if self._fits:
            query, last = self.region.clamped_positions[:, :, None], self.region.last[:, None, None]
            position = last - (last - index) % self.ring
            return (position >= first(query)) & (position <= query)
        query, last = self.region.positions[:, :, None], self.region.offset[:, None, None] - 1
        position = last - (last - index) % self.ring
        key = self.region.positions[:, None, :]
        before, new = position >= first(query), (key <= query) & (key >= first(query))
        return mx.concatenate([before, new], axis=-1)

    def _first_visible(self, window: int) -> Callable[[mx.array], mx.array]:
        """Function from a query's position to the position of the first key that it attends to.

        mlx-lm keeps `window` tokens when a pass begins, so the pass's first token attends to these
        and itself at most; with a wider mask, later tokens attend to more. Each draft token attends
        as if it were fed alone.
        """
        if window <= self.window or not self.traits.wide_masks or self.region.singly:
            window = min(window, self.window)
            return lambda query: mx.maximum(query - (window - 1), 0)
        kept = mx.maximum(self.region.offset[:, None, None] - (self.window - 1), 0)
        return lambda query: mx.maximum(query - (window - 1), kept)
