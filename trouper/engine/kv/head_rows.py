"""The passes of drafters that read the hidden states of the model, over rows in slots."""

# From the hidden state of token p and the embedding of token p + 1 a head predicts token p + 2.
# Position p of the head's KV belongs to both tokens. The head is a further layer of the slots, as a
# draft model's layers are (`DraftRows`), with two differences. Hidden states come from the model's
# own passes only, and are held until the head runs: at once in a prefill, where laziness spares all
# but keys and values, and with the next draft of a decoding row. Resting rows catch up every
# `HELD_PASSES` steps.
# A restored row lacks the hidden state of the last restored token. The KV there is that of the
# storing row, correct if the same token followed. Wrong KV costs acceptance, never a token.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import mlx.core as mx
import numpy as np

from trouper.engine.kv.banks import Banks
from trouper.engine.kv.draft_rows import DraftRows
from trouper.engine.kv.pass_segments import Segment, lengths_of, rows_of
from trouper.engine.passes.pass_shapes import Shapes
from trouper.engine.passes.region import Ints
from trouper.engine.platform.eager_eval import start_eval
from trouper.protocol.plans import ProposerName, RowId

# Passes after which resting rows catch up: held states take (rows, dim) each, and catching up takes
# about one token's time.
HELD_PASSES = 32
# Positions of passes that a row holds before catching up. A verifying pass holds the states of all
# drafts together.
HELD_POSITIONS = 4 * HELD_PASSES


def max_held_positions(width: int) -> int:
    """Maximum of held positions with passes of at most `width` tokens: beyond the limit come those
    of the pass that triggers catching up, and of two later ones."""
    return HELD_POSITIONS + 3 * width


class TargetHead(Protocol):
    """An MTP head (`spec_decode/draft_model.py`) or a drafter that reads taps
    (`spec_decode/tapped_drafters.py`), and the shared parts of the model."""

    proposer: ProposerName

    @property
    def block(self) -> int:
        """Tokens of a block, which one pass drafts, with the last committed one; 0: a pass for
        each token."""

    @property
    def mask_token(self) -> int:
        """Stands for the tokens of a block that are not known."""

    @property
    def anchored(self) -> bool:
        """Whether in a block the last committed token's state predicts the next one, or the state
        at each mask the token there."""

    def __call__(
        self, tokens: mx.array, states: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        """Run tokens (n, width) with the hidden states (n, width, dim) of the tokens before each.
        Returns hidden states."""

    def picked(self, states: mx.array, before: mx.array | None = None) -> mx.array:
        """The most likely tokens (n, width) by the head's own hidden states (n, width, dim) of a
        block, behind the tokens `before` (n,)."""

    def target_states(self, tokens: mx.array, cache: Any) -> Any:
        """The model's pass, for `split`."""

    def split(self, outputs: Any) -> tuple[mx.array | None, mx.array]:
        """Hidden states (n, width, dim), which the head reads, and logits. None: not known."""


@attrs.frozen(eq=False)
class HeldStates:
    """Hidden states of a row's tokens from `start` to `stop`: from `first` on in the pass's
    flattened states (n, width, dim)."""

    states: mx.array
    first: int
    start: int
    stop: int

    def copied_from(self, start: int) -> HeldStates:
        """Copy the states from token `start` on, which frees the pass's others."""
        first = self.first + start - self.start
        indices = np.arange(first, first + self.stop - start, dtype=np.int32)
        copy = mx.flatten(self.states, 0, 1)[mx.array(indices)][None]
        start_eval([copy])
        return HeldStates(copy, 0, start, self.stop)


class HeadRows(DraftRows):
    def __init__(self, head: Any, banks: Banks, shapes: Shapes, cache_index: int) -> None:
        super().__init__(head, banks, shapes, cache_index)
        self._head: TargetHead = head
        self.proposer = self._head.proposer
        self.tokens: dict[RowId, list[int]] = {}
        # States that the head has not run, and that of the last run token; without gaps.
        self._held: dict[RowId, list[HeldStates]] = {}
        # Positions of the held passes, by row.
        self._positions: dict[RowId, int] = {}
        # Passes since all rows caught up.
        self._passes = 0
        # Whether a row left since the last step: others may hold the states of passes that were
        # mostly the row's.
        self._departed = False
        # Rows with several tokens in one pass, or many positions, which catch up together.
        self._behind: set[RowId] = set()

    # -- rows and their hidden states ------------------------------------------------------------

    def open(self, row: RowId, prompt: Sequence[int], restored: int) -> None:
        """Add a row whose first `restored` tokens have KV."""
        self.tokens[row], self._held[row], self.lengths[row] = list(prompt), [], restored
        self._positions[row] = 0

    def drop(self, row: RowId) -> None:
        if self.tokens.pop(row, None) is not None:
            del self._held[row], self.lengths[row], self._positions[row]
            self._behind.discard(row)
            self._departed = True

    def logits_after(self, segments: Sequence[Segment], counts: Ints, outputs: Any) -> mx.array:
        """Hold the hidden states of the model's pass (`TargetHead.target_states`), of whose tokens
        counts[i] are row i's own. Comes before the lengths grow. Returns logits."""
        hidden, logits = self._head.split(outputs)
        if hidden is None:
            return logits
        rows, lengths = rows_of(segments), lengths_of(segments).tolist()
        for index, (row, start, count) in enumerate(
            zip(rows, lengths, counts.tolist(), strict=True)
        ):
            if count and row in self._held:
                self._hold(row, HeldStates(hidden, index * hidden.shape[1], start, start + count))
                self._positions[row] += hidden.shape[1]
                if count > HELD_PASSES or self._positions[row] > HELD_POSITIONS:
                    self._behind.add(row)
        self._passes += 1
        return logits

    def _hold(self, row: RowId, new: HeldStates) -> None:
        # Add hidden states in place of those of wrong drafts.
        held = self._held[row]
        if held and held[-1].stop > new.start:
            held[-1] = attrs.evolve(held[-1], stop=new.start)
        held.append(new)

    def _release(self, row: RowId) -> None:
        # Forget the states of run tokens except the last, with which a draft begins. The rest of a
        # long pass is copied, to free other rows and tokens.
        needed = self.lengths[row] - 1
        self._held[row] = held = [each for each in self._held[row] if each.stop > needed]
        if held and held[0].start < needed:
            held[0] = held[0].copied_from(needed)
        self._positions[row] = sum(each.states.shape[1] for each in held)

    # -- passes ----------------------------------------------------------------------------------

    def keep_up(self, feed: Callable[[], None]) -> None:
        """Catch up with all rows if many passes are held, or with rows that hold many positions.
        `feed` adds known tokens. The planned memory is `max_held_positions` a row."""
        crowded = self._departed and self._held_positions() > HELD_POSITIONS * len(self.tokens)
        self._departed = False
        if self._passes >= HELD_PASSES or self._behind or crowded:
            feed()
            self.catch_up(
                [*self._behind] if self._passes < HELD_PASSES and not crowded else self.tokens
            )
        if crowded:
            for row, held in self._held.items():
                held[:] = [each.copied_from(each.start) for each in held]
                self._positions[row] = sum(each.states.shape[1] for each in held)

    def _held_positions(self) -> int:
        # Positions of all held passes.
        arrays = {id(each.states): each.states for held in self._held.values() for each in held}
        return sum(states.shape[0] * states.shape[1] for states in arrays.values())

    def catch_up(self, rows: Iterable[RowId]) -> None:
        """Compute the known KV of these rows except the last token's, with which a draft begins."""
        ends = {row: len(self.tokens[row]) - 2 for row in rows if row in self.tokens}
        self._behind.difference_update(ends)
        if len(ends) == len(self.tokens):
            self._passes = 0
        self.complete(ends)

    def complete(self, ends: Mapping[RowId, int]) -> None:
        """Compute missing KV of each row's first `ends[row]` tokens."""
        # An unknown next token counts as a repetition: such KV may be copied, and is computed again
        # for the row.
        missing = {
            row: self._following(row, end) for row, end in ends.items() if row in self.tokens
        }
        self.prefill(missing)
        for row in missing:
            self.lengths[row] = min(self.lengths[row], len(self.tokens[row]) - 1)
            self._release(row)

    def _following(self, row: RowId, end: int) -> list[int]:
        # The token after each one that lacks KV, up to `end`, or while hidden states are held.
        held, tokens = self._held[row], self.tokens[row]
        end = min(end, held[-1].stop) if held else 0
        return [*tokens, tokens[-1]][self.lengths[row] + 1 : end + 1]

    def draft(
        self, sizes: Mapping[RowId, int], agree: Callable[[mx.array], mx.array], at_once: int
    ) -> dict[RowId, list[int]]:
        """Draft sizes[row] tokens for each decoding row (see `propose`). The first pass runs up to
        `at_once` lacking tokens."""
        sizes = {row: size for row, size in sizes.items() if self._knows_last(row)}
        if not sizes:
            return {}
        for row in sizes:
            self.lengths[row] = min(self.lengths[row], len(self.tokens[row]) - 2)
        self.catch_up(
            [row for row in sizes if len(self.tokens[row]) - 1 - self.lengths[row] > at_once]
        )
        fed = {row: self.tokens[row][self.lengths[row] + 1 :] for row in sizes}
        drafts = self.propose(fed, sizes, agree)
        # The head's own hidden states stood in for the model's behind the last token.
        for row in sizes:
            self.lengths[row] = len(self.tokens[row]) - 1
            self._release(row)
        return drafts

    def _knows_last(self, row: RowId) -> bool:
        # Whether the hidden state for the begin of a draft is held.
        held = self._held.get(row, [])
        return bool(held) and held[-1].stop >= len(self.tokens[row]) - 1 > held[0].start

    def _before(self, rows: Sequence[RowId], counts: Ints) -> mx.array:
        # (n, width, dim): hidden states of the rows' next counts[i] tokens.
        passes = dict[int, tuple[mx.array, int]]()
        total, indices = 0, np.zeros((len(rows), int(counts.max())), np.int32)
        for index, (row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
            begin = self.lengths[row]
            for held in self._held[row] if count else ():
                start, stop = max(held.start, begin), min(held.stop, begin + count)
                if start >= stop:
                    continue
                if id(held.states) not in passes:
                    passes[id(held.states)] = held.states, total
                    total += held.states.shape[0] * held.states.shape[1]
                first = passes[id(held.states)][1] + held.first + start - held.start
                indices[index, start - begin : stop - begin] = np.arange(
                    first, first + stop - start
                )
        states = [mx.flatten(states, 0, 1) for states, _ in passes.values()]
        return (states[0] if len(states) == 1 else mx.concatenate(states))[mx.array(indices)]

    def _after(self, last: mx.array) -> mx.array:
        return last[:, None]

    def _pick(self, last: mx.array) -> mx.array:
        return self._head.picked(last[:, None])[:, 0]


class BlockRows(HeadRows):
    """Rows of a drafter of blocks: hidden states become KV alone, and one pass over the last token
    and masks drafts all tokens."""

    def propose(
        self,
        fed: Mapping[RowId, Sequence[int]],
        sizes: Mapping[RowId, int],
        agree: Callable[[mx.array], mx.array],
    ) -> dict[RowId, list[int]]:
        segments = self._segments(sizes)
        self._run(segments, fed)
        rows, block = rows_of(segments), self._head.block
        tokens = np.full((len(rows), block), self._head.mask_token, np.int32)
        for index, row in enumerate(rows):
            if row in sizes:
                tokens[index, 0] = self.tokens[row][-1]
        counts = self._counts(rows, dict.fromkeys(sizes, block))
        states = self._forward(segments, mx.array(tokens), counts, None)
        first = 0 if self._head.anchored else 1
        states = states[:, first : min(block, first + max(sizes.values()))]
        picked = self._head.picked(states, mx.array(tokens[:, 0]))
        drafts = dict(zip(rows, np.array(agree(picked)).tolist(), strict=True))
        return {row: drafts[row][:size] for row, size in sizes.items()}


def rows_of_head(head: Any, banks: Banks, shapes: Shapes, cache_index: int) -> HeadRows:
    return (BlockRows if head.block else HeadRows)(head, banks, shapes, cache_index)
