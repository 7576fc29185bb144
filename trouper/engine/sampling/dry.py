"""DRY, "don't repeat yourself": a penalty on the token that would continue a repetition
(https://github.com/oobabooga/text-generation-webui/pull/5677), in llama.cpp's form."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trouper.engine.passes.region import Ints
from trouper.engine.sampling.token_rows import RowTokens, TokenRows, widened, with_state
from trouper.engine.spec_decode.verification_spans import Spans, indices
from trouper.protocol.plans import Breakers
from trouper.protocol.sampling import Sampling


def matches_of(tokens: Ints, longest: int) -> Ints:
    """Count the tokens up to each that equal the last ones, (n,), at most `longest`; 0 for the last
    itself. By the Z-algorithm, from the last token to the first."""
    text: list[int] = tokens[::-1].tolist()
    size, begin, end = len(text), 0, 0
    lengths = [0] * size
    for at in range(1, size):
        length = min(end - at, lengths[at - begin]) if at < end else 0
        while at + length < size and text[length] == text[at + length]:
            length += 1
        lengths[at] = length
        if at + length > end:
            begin, end = at, at + length
    return np.minimum(np.array(lengths[::-1], np.int32), longest)


def tokens_after_break(
    tokens: Ints, breaking: NDArray[np.bool_], sequences: Sequence[tuple[int, ...]], longest: int
) -> int:
    """Count the tokens since the last breaker, at most `longest`. breaking (V,): tokens that
    contain a breaker. `sequences`: tokens over which a breaker is spread."""
    recent = tokens[max(len(tokens) - longest, 0) :]
    single = np.flatnonzero(breaking[recent])
    after = len(recent) - 1 - int(single[-1]) if len(single) else len(recent)
    if not sequences:
        return after
    known, lengths = set(sequences), {len(sequence) for sequence in sequences}
    lasts = np.array(sorted({sequence[-1] for sequence in sequences}))
    for back in np.flatnonzero(np.isin(recent[::-1][:after], lasts)).tolist():
        end = len(tokens) - back
        if any(
            tuple(tokens[end - length : end].tolist()) in known
            for length in lengths
            if length <= end
        ):
            return int(back)
    return after


LARGEST_EXPONENT = 88.7228  # llama.cpp's bound of a penalty: the logarithm of the largest float32.

# Largest penalty: with an infinite one a row without any other token would draw nothing.
LARGEST = 1e30
LONGEST_MATCH = 1024
"""Maximum length of a match."""
ANY, NEVER = -2, -3
"""In a sequence that breaks: any token; no token."""
State = tuple[mx.array, mx.array, NDArray[np.int64]]
"""Tokens and matches, and the lengths on the host."""


def longest_match(row: Sampling) -> int:
    """Number of tokens of a repetition beyond which the penalty no longer grows."""
    if row.dry_base == 1:
        return row.dry_allowed_length
    exponent = LARGEST_EXPONENT / np.log(row.dry_base)
    return int(min(row.dry_allowed_length + exponent, max(row.dry_allowed_length, LONGEST_MATCH)))


@attrs.define(eq=False)
class Repetitions:
    """State of one row: tokens, and matches (W,) int32, the number of tokens up to each that equal
    the last ones."""

    row: RowTokens
    matches: mx.array
    breaking: mx.array
    """(V,) bool: tokens that contain a breaker."""
    sequences: Ints
    """(s, L): tokens over which a breaker is spread, filled with ANY from the left."""

    @classmethod
    def of(
        cls, tokens: Ints, sampling: Sampling, breakers: Breakers, vocabulary: int
    ) -> Repetitions:
        """Make the state of a row that enters or returns with these tokens."""
        breaking = np.zeros(vocabulary, np.bool_)
        single = np.frombuffer(breakers.tokens, "<i4")
        breaking[single[single < vocabulary]] = True
        sequences = padded_sequences(breakers.sequences)
        row = RowTokens.of(tokens)
        matches = np.zeros(row.tokens.shape[0], np.int32)
        after = tokens_after_break(tokens, breaking, breakers.sequences, longest_match(sampling))
        matches[: len(tokens)] = matches_of(tokens, after)
        return cls(row, mx.array(matches), mx.array(breaking), sequences)


def padded_sequences(sequences: Sequence[Sequence[int]]) -> Ints:
    width = max(map(len, sequences), default=0)
    rows = [[ANY] * (width - len(sequence)) + [*sequence] for sequence in sequences]
    return np.array(rows, np.int32).reshape(len(rows), width)


class Dry:
    """DRY of one set of rows, k of which use DRY."""

    def __init__(self, rows: Sequence[Sampling], states: Sequence[Repetitions | None]) -> None:
        """Stack the parameters and states of those rows that use DRY. `states`: None for the
        others."""
        kept = with_state(rows, states)
        self._states = [state for _, _, state in kept]
        if not kept:
            return
        self._rows = np.array([index for index, _, _ in kept], np.int32)
        self._row_indices, self._indices = mx.array(self._rows), mx.arange(len(kept))[:, None]
        chosen = [row for _, row, _ in kept]
        self._multiplier = mx.array([row.dry_multiplier for row in chosen])[:, None]
        self._base = mx.array([row.dry_base for row in chosen])[:, None]
        self._allowed = mx.array([row.dry_allowed_length for row in chosen], mx.int32)[:, None]
        self._longest = mx.array([longest_match(row) for row in chosen], mx.int32)[:, None]
        self._last_n = np.array(
            [row.dry_penalty_last_n if row.dry_penalty_last_n > 0 else 2**30 for row in chosen]
        )
        self._tokens = TokenRows([state.row for state in self._states])
        self._matches = mx.stack(
            [widened(state.matches, self._tokens.width, 0) for state in self._states]
        )
        self._breaking = mx.stack([state.breaking for state in self._states])
        self._sequences = _stacked([state.sequences for state in self._states])

    def __call__(self, logits: mx.array, spans: Spans | None = None) -> mx.array:
        """Penalize logits (n, V), or (positions, V) of the spans, each after the draft tokens
        before."""
        if not self._states:
            return logits
        if spans is None:
            state = self._tokens.tokens, self._matches, self._tokens.lengths
            return self._penalized(logits, self._row_indices, np.arange(len(self._rows)), state)
        positions, which = spans.of(self._rows)
        steps = spans.steps[positions]
        tokens, matches, lengths = self._along(spans, int(steps.max()))
        at = indices(steps), indices(which)
        return self._penalized(
            logits, indices(positions), which, (tokens[at], matches[at], lengths[steps, which])
        )

    def _along(self, spans: Spans, steps: int) -> State:
        """Return tokens and matches (steps + 1, k, W) and lengths (steps + 1, k) after each draft
        token."""
        tokens, matches = self._tokens.copy(), self._matches
        drafts = spans.drafts[self._rows]
        after = [(tokens.tokens, matches, tokens.lengths)]
        for step in range(steps):
            matches = self._append(tokens, matches, indices(drafts[:, step]))
            after.append((tokens.tokens, matches, tokens.lengths))
        width = tokens.width
        return (
            mx.stack([widened(one, width, -1) for one, _, _ in after]),
            mx.stack([widened(one, width, 0) for _, one, _ in after]),
            np.stack([lengths for _, _, lengths in after]),
        )

    def _append(
        self,
        rows: TokenRows,
        matches: mx.array,
        tokens: mx.array,
        mask: NDArray[np.bool_] | None = None,
    ) -> mx.array:
        """Append tokens (k,) to the `rows` of `mask` (k,). Returns the matches."""
        # A new token t makes the match at j one longer than the match at j - 1 was, if the token at
        # j is t, else 0: one comparison of (k, W) on the device. A breaker sets all matches to 0.
        before = rows.tokens
        rows.append(tokens, mask)
        after = mx.pad(matches[:, :-1], [(0, 0), (1, 0)]) + 1
        same = (before == tokens[:, None]) & ~self._breaks(rows, tokens)
        changed = mx.where(same, mx.minimum(after, self._longest), 0)
        if mask is not None:
            changed = mx.where(mx.array(mask)[:, None], changed, matches)
        return widened(changed, rows.width, 0)

    def _breaks(self, rows: TokenRows, tokens: mx.array) -> mx.array:
        """Return whether a breaker ends with each row's last token, (k, 1)."""
        single = self._breaking[self._indices, tokens[:, None]]
        if self._sequences is None:
            return single
        places = rows.lengths[:, None] - np.arange(self._sequences.shape[2], 0, -1)
        recent = mx.where(
            mx.array(places >= 0), rows.tokens[self._indices, indices(np.maximum(places, 0))], NEVER
        )
        found = (self._sequences == recent[:, None, :]) | (self._sequences == ANY)
        return single | found.all(axis=-1).any(axis=-1, keepdims=True)

    def _penalized(
        self, logits: mx.array, positions: mx.array, which: NDArray[np.int64], state: State
    ) -> mx.array:
        """Apply penalties at the positions (m,). which (m,): their rows. `state`: tokens and
        matches (m, W), lengths (m,)."""
        tokens, matches, lengths = state
        rows = indices(which)
        following, matches = tokens[:, 1:], matches[:, :-1]
        window = mx.array(np.maximum(lengths - self._last_n[which], 0))[:, None]
        repeated = mx.minimum(matches, mx.arange(matches.shape[1]) + 1 - window)
        ids = mx.maximum(following, 0)
        applies = (
            (repeated >= self._allowed[rows])
            & (following >= 0)
            & ~self._breaking[rows[:, None], ids]
        )
        exponent = (repeated - self._allowed[rows]).astype(mx.float32)
        penalty = self._multiplier[rows] * self._base[rows] ** mx.where(applies, exponent, 0)
        penalty = mx.where(applies, mx.minimum(penalty, LARGEST), 0)
        largest = mx.zeros((len(lengths), logits.shape[1]))
        largest = largest.at[mx.arange(len(lengths))[:, None], ids].maximum(penalty)
        return logits.astype(mx.float32).at[positions].add(-largest)

    def count(self, tokens: mx.array) -> None:
        """Count the step's lazy tokens, (n,)."""
        if self._states:
            self._matches = self._append(
                self._tokens, self._matches, tokens[self._row_indices].astype(mx.int32)
            )

    def accepted(self, spans: Spans, tokens: Ints, kept: NDArray[np.bool_]) -> None:
        for positions, mask in spans.kept_of(self._rows, kept) if self._states else ():
            self._matches = self._append(
                self._tokens, self._matches, indices(tokens[positions]), mask
            )

    def unstack(self) -> None:
        """Write the states back to their rows."""
        if self._states:
            self._tokens.unstack()
        for index, state in enumerate(self._states):
            state.matches = self._matches[index]

    def state(self) -> list[mx.array]:
        """Return the arrays that steps change, (k, W)."""
        return [self._tokens.tokens, self._matches] if self._states else []


def _stacked(sequences: Sequence[Ints]) -> mx.array | None:
    """Stack the sequences of k rows to (k, s, L); None: there are none."""
    count, width = max(map(len, sequences)), max(one.shape[1] for one in sequences)
    if not count:
        return None
    stacked = np.full((len(sequences), count, width), NEVER, np.int32)
    for index, one in enumerate(sequences):
        stacked[index, : len(one)] = ANY
        stacked[index, : len(one), width - one.shape[1] :] = one
    return mx.array(stacked)
