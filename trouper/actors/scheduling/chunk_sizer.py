"""Scheduling policy: pure, so that it is tested without a clock."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trouper.protocol.plans import Chunk, RowId

IDLE_STEP_S = 0.5
"""Length of a prefill step when no stream waits: long enough to be efficient, short enough that a newcomer, a
withdrawal or a shutdown is seen soon."""
FIRST_CHUNK_TOKENS = 16
"""Before anything was measured. It grows fourfold a step, so a fast device is not held back for long."""
LEAST_BUSY_TOKENS = 16
"""On CPU 16 tokens beside decode cost 1.4 decode steps, and fewer hardly less: below, only the number of steps grows."""
LEAST_IDLE_TOKENS = 64
"""Nobody waits for a prefill-only step, and smaller ones pay the weights' memory traffic again and again."""

SURPRISING = 3.0
"""A step that takes so many times as long as one that prefilled about as much says something of the machine, not of the
chunk: a device that prepares a new shape, a busy moment. Once; twice in a row it is believed. Without that one slow step made
chunks so small that each was of a new shape, and slow for that."""


@attrs.define
class ChunkSizer:
    """How many prompt tokens one step may prefill so that it ends within `target_s`.

    A controller, not a model: cost depends on the device, the context and the batch, and drifts.
    It shrinks while steps are too long and grows while they are short.
    """

    target_s: float
    most: int
    tokens: int = FIRST_CHUNK_TOKENS
    least: int = LEAST_BUSY_TOKENS
    _measured: bool = False
    _seen: tuple[int, float] = (0, 0.0)
    """Tokens and seconds of the last step that was believed."""
    _surprised: bool = False

    def __attrs_post_init__(self) -> None:
        self.tokens, self.least = min(self.tokens, self.most), min(self.least, self.most)

    def expect(self, tokens: int) -> None:
        """A guess, from other steps, that counts until one was measured."""
        if not self._measured:
            self.tokens = max(self.least, min(self.most, tokens))

    def measured(self, tokens: int, seconds: float) -> None:
        """A step that prefilled so many tokens took so long (decode included)."""
        if seconds <= 0 or tokens <= 0 or self._surprising(tokens, seconds):
            return
        self._measured, self._seen = True, (tokens, seconds)
        ratio = self.target_s / seconds
        if ratio < 1:  # A remainder of a prompt, or noise, says little about the whole chunk: halve at most.
            self.tokens = max(self.least, min(self.tokens, int(max(tokens, self.tokens) * max(ratio, 0.5))))
        elif tokens >= self.tokens:
            self.tokens = max(self.tokens, min(self.most, int(tokens * min(ratio * 0.9, 4.0))))

    def _surprising(self, tokens: int, seconds: float) -> bool:
        seen_tokens, seen_s = self._seen
        self._surprised = not self._surprised and tokens <= 1.25 * seen_tokens and seconds > SURPRISING * seen_s
        return self._surprised


def share_chunks(remaining: Sequence[tuple[RowId, int]], budget: int, most: int) -> tuple[Chunk, ...]:
    """Split `budget` tokens among prefilling rows: equal parts, what a short prompt leaves goes to the others.

    Equal parts keep a short prompt from waiting behind a long one, and pad least when they run
    together. Every row gets at least one token, so none starves. `remaining`: rows oldest first.
    """
    chunks: dict[RowId, int] = {}
    left = max(budget, len(remaining))
    for place, (row, wanted) in enumerate(sorted(remaining, key=lambda pair: pair[1])):
        share = max(1, left // (len(remaining) - place))
        chunks[row] = min(wanted, share, most)
        left -= chunks[row]
    return tuple(Chunk(row, chunks[row]) for row, _ in remaining)


def free_rows(admitted: int, prefilling: int, rows: int, prefill_rows: int, under_pressure: bool) -> int:
    """How many queued requests may enter now. Under memory pressure only an empty batch takes one, to make progress."""
    if under_pressure:
        return 1 if admitted == 0 else 0
    return max(0, min(rows - admitted, prefill_rows - prefilling))
