"""Sizes of prefill chunks. Pure, so that the policy is tested without a clock."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trouper.protocol.plans import Chunk, RowId

IDLE_STEP_S = 0.5
"""Length of a prefill step when no stream waits: long enough to be efficient, short enough that a
newcomer, a withdrawal or a shutdown is seen soon."""
FIRST_CHUNK_TOKENS = 16
"""Chunk size before any measurement. It grows up to fourfold a step, so a fast device is not held
back for long."""
MIN_BUSY_TOKENS = 16
"""Minimum chunk of a step that also decodes. On CPU 16 tokens beside decode cost 1.4 decode steps,
and fewer tokens hardly less: a smaller chunk only increases the number of steps."""
MIN_IDLE_TOKENS = 64
"""Minimum chunk of a step that only prefills. No stream waits for such a step, and each smaller one
would pay the weights' memory traffic again."""

MIN_LONE_TOKENS = 64
"""Minimum chunk of a row whose chunk runs in a pass of its own, where several rows could have one:
each pass reads the weights. Beside a stream 16 prompts of 500 tokens to embed got one token each a
step, in 16 passes, and took longer than ten minutes."""

SURPRISING = 3.0
"""Factor over the duration of a step with about as many prefill tokens, from which a measurement is
ignored: it reflects the machine (a device that compiles a new shape, a busy moment), not the chunk.
A second such step in a row is accepted. Without this rule one slow step made chunks so small that
each had a new shape, and was slow for that reason."""


@attrs.define
class ChunkSizer:
    """Number of prompt tokens that one step may prefill so that it ends within `target_s`.

    A controller, not a model: cost depends on the device, the context and the batch, and drifts.
    The chunk shrinks while steps are too long and grows while they are short.
    """

    target_s: float
    max_tokens: int
    tokens: int = FIRST_CHUNK_TOKENS
    min_tokens: int = MIN_BUSY_TOKENS
    _measured: bool = False
    _seen: tuple[int, float] = (0, 0.0)
    """Tokens and seconds of the last accepted step."""
    _surprised: bool = False

    def __attrs_post_init__(self) -> None:
        self.tokens, self.min_tokens = (
            min(self.tokens, self.max_tokens),
            min(self.min_tokens, self.max_tokens),
        )

    def expect(self, tokens: int) -> None:
        """Set an estimate from other steps, which holds until the first measurement."""
        if not self._measured:
            self.tokens = max(self.min_tokens, min(self.max_tokens, tokens))

    def measured(
        self, tokens: int, seconds: float, *, limited: bool = False, preparing: bool = False
    ) -> None:
        """Learn from a step that prefilled `tokens` tokens in `seconds`, decode included.
        `limited`: more would have been prefilled if it had been allowed; chunks that are rounded
        have fewer tokens than that. `preparing`: the device prepared kernels in it, which takes as
        long with a smaller chunk: such a step can only show that chunks may be larger."""
        if (
            seconds <= 0
            or tokens <= 0
            or (preparing and seconds > self.target_s)
            or self._surprising(tokens, seconds)
        ):
            return
        self._measured, self._seen = True, (tokens, seconds)
        ratio = self.target_s / seconds
        # A remainder of a prompt, or noise, says little about the whole chunk: halve at most.
        if ratio < 1:
            self.tokens = max(
                self.min_tokens, min(self.tokens, int(max(tokens, self.tokens) * max(ratio, 0.5)))
            )
        elif limited or tokens >= self.tokens:
            self.tokens = max(
                self.tokens, min(self.max_tokens, int(tokens * min(ratio * 0.9, 4.0)))
            )

    def _surprising(self, tokens: int, seconds: float) -> bool:
        seen_tokens, seen_s = self._seen
        self._surprised = (
            not self._surprised and tokens <= 1.25 * seen_tokens and seconds > SURPRISING * seen_s
        )
        return self._surprised


def take_turns(
    remaining: Sequence[tuple[RowId, int]], budget: int, last: RowId
) -> list[tuple[RowId, int]]:
    """Choose the rows of the next step where each row's chunk runs in a pass of its own, so that
    `budget` tokens make few passes.

    Round robin in the order of row ids, which grow: the rows after `last`, the last row of the step
    before, come first, and a newcomer comes after those that entered before it. Each row waits for
    every other row once at most. `remaining` as in `share_chunks`; so is what is returned, with
    fewer rows.
    """
    chosen, tokens = list[tuple[RowId, int]](), 0
    for row, requested in sorted(remaining, key=lambda pair: (pair[0] <= last, pair[0])):
        if not chosen or tokens + min(requested, MIN_LONE_TOKENS) <= budget:
            chosen.append((row, requested))
            tokens += min(requested, MIN_LONE_TOKENS)
        else:
            break
    return chosen


def share_chunks(
    remaining: Sequence[tuple[RowId, int]], budget: int, max_tokens: int
) -> tuple[Chunk, ...]:
    """Split `budget` tokens among prefilling rows: equal shares; a short prompt leaves the rest of
    its share to the others.

    Equal parts keep a short prompt from waiting behind a long one: it gets its share of the first
    plan after it entered, whatever the others have left. However many short prompts arrive, a long
    one gets an equal share of each step, so none starves. Rows that want more than a share all get
    the same number of tokens, even if fewer tokens than such rows are left over: rows run together
    as wide as the widest, so one more token for some would be padding for the others. `remaining`:
    rows and their remaining tokens, oldest row first.
    """
    chunks: dict[RowId, int] = {}
    left, equal = max(budget, len(remaining)), 0
    for index, (row, requested) in enumerate(sorted(remaining, key=lambda pair: pair[1])):
        share = equal or left // (len(remaining) - index)
        if requested > share:
            equal = share  # Those that follow want more, too.
        chunks[row] = min(requested, share, max_tokens)
        left -= chunks[row]
    return tuple(Chunk(row, chunks[row]) for row, _ in remaining)


def round_chunk(start: int, tokens: int, step: int) -> int:
    """Shorten a chunk of `tokens` tokens behind `start` so that it ends at a multiple of `step`, or
    of a smaller power of two, and has at least half as many tokens: the lengths that attention
    meets then recur from prompt to prompt."""
    unit = min(step, 1 << max(tokens.bit_length() - 2, 0))
    return (start + tokens) // unit * unit - start


def free_rows(
    admitted: int, prefilling: int, rows: int, prefill_rows: int, under_pressure: bool
) -> int:
    """Number of queued requests that may be admitted now. Under memory pressure only an empty batch
    takes one, to make progress."""
    if under_pressure:
        return 1 if admitted == 0 else 0
    return max(0, min(rows - admitted, prefill_rows - prefilling))
