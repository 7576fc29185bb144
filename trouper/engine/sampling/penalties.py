from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trouper.engine.passes.region import Ints
from trouper.engine.sampling.sampler import Drawn
from trouper.engine.sampling.token_rows import with_state
from trouper.engine.spec_decode.verification_spans import Spans, indices
from trouper.protocol.sampling import Sampling

NO_TOKENS: Ints = np.zeros(0, np.int32)


class Bias:
    """logit_bias of all rows as one scatter-add."""

    def __init__(self, rows: Sequence[Sampling]) -> None:
        entries = [
            (index, token, value)
            for index, row in enumerate(rows)
            for token, value in row.logit_bias
        ]
        self._any = bool(entries)
        if entries:
            row_list, tokens, values = zip(*entries, strict=True)
            self._rows = np.array(row_list, np.int32)
            self._row_indices = mx.array(row_list)
            self._tokens = mx.array(tokens)
            self._values = mx.array(values, mx.float32)

    def __call__(self, logits: mx.array, spans: Spans | None = None) -> mx.array:
        """Add to logits (n, V), or (positions, V) of the spans, in float32: between 16 and 32
        bfloat16 has steps of an eighth."""
        if not self._any:
            return logits
        logits = logits.astype(mx.float32)
        if spans is None:
            return logits.at[self._row_indices, self._tokens].add(self._values)
        positions, entries = map(indices, spans.of(self._rows))
        return logits.at[positions, self._tokens[entries]].add(self._values[entries])


class MinTokens:
    """Masks end tokens before min_tokens. `rows`: (min_tokens, end tokens) of each row."""

    def __init__(self, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        entries = [
            (index, token, minimum)
            for index, (minimum, ends) in enumerate(rows)
            for token in ends
            if minimum
        ]
        table = np.array(entries, np.int64).reshape(-1, 3)
        self._row_indices, self._tokens, self._minimum = table[:, 0], table[:, 1], table[:, 2]

    def __call__(self, logits: mx.array, drawn: Drawn, spans: Spans | None = None) -> mx.array:
        """Mask logits (n, V), or (positions, V) of the spans. `drawn`: number of tokens drawn
        before each."""
        if not self._row_indices.size:
            return logits
        positions, tokens, minimum = self._row_indices, self._tokens, self._minimum
        if spans is not None:
            positions, entries = spans.of(positions)
            tokens, minimum = tokens[entries], minimum[entries]
        early = drawn[positions].astype(np.int64) < minimum
        if not early.any():
            return logits
        changed = logits.astype(mx.float32)
        changed[mx.array(positions[early]), mx.array(tokens[early])] = -mx.inf
        return changed


class History:
    """Token statistics of one row: counts of generated tokens, and tokens that occurred at all,
    (V,) each."""

    def __init__(self, prompt: Ints, vocabulary: int, output: Ints = NO_TOKENS) -> None:
        """`output`: tokens that a resumed row has generated."""
        self.counts = mx.array(np.bincount(output, minlength=vocabulary).astype(np.float32))
        seen = np.zeros(vocabulary, np.bool_)
        seen[prompt] = True
        seen[output] = True
        self.seen = mx.array(seen)


class Penalties:
    """Penalties of one set of rows.

    Repetition (Keskar et al. 2019, CTRL): divides positive and multiplies negative logits of tokens
    in prompt or answer. Presence and frequency as OpenAI defines them, over the answer.
    """

    def __init__(self, rows: Sequence[Sampling], histories: Sequence[History | None]) -> None:
        kept = with_state(rows, histories)
        self._histories = [history for _, _, history in kept]
        if kept:
            self._rows = np.array([index for index, _, _ in kept], np.int32)
            self._row_indices = mx.array(self._rows)
            self._repetition = mx.array([row.repetition_penalty for _, row, _ in kept])[:, None]
            self._presence = mx.array([row.presence_penalty for _, row, _ in kept])[:, None]
            self._frequency = mx.array([row.frequency_penalty for _, row, _ in kept])[:, None]
            self._counts = mx.stack([history.counts for history in self._histories])
            self._seen = mx.stack([history.seen for history in self._histories])
            self._indices = mx.arange(len(kept))

    def __call__(self, logits: mx.array, spans: Spans | None = None) -> mx.array:
        """Penalize logits (n, V), or (positions, V) of the spans, each after the draft tokens
        before."""
        if not self._histories:
            return logits
        if spans is None:
            rates = self._repetition, self._presence, self._frequency
            return _penalized(logits, self._row_indices, self._seen, self._counts, rates)
        positions, which = spans.of(self._rows)
        rows_at = indices(which)
        seen, counts = self._seen[rows_at], self._counts[rows_at]
        which, drafted = spans.before(positions)
        if len(which):
            after, tokens = indices(which), indices(drafted)
            counts = counts.at[after, tokens].add(1.0)
            seen[after, tokens] = True
        rates = self._repetition[rows_at], self._presence[rows_at], self._frequency[rows_at]
        return _penalized(logits, indices(positions), seen, counts, rates)

    def count(self, tokens: mx.array) -> None:
        """Count the step's lazy tokens, (n,)."""
        if self._histories:
            sampled = tokens[self._row_indices]
            self._counts = self._counts.at[self._indices, sampled].add(1.0)
            self._seen[self._indices, sampled] = True

    def accepted(self, spans: Spans, tokens: Ints, kept: NDArray[np.bool_]) -> None:
        if self._histories:
            positions, which = spans.of(self._rows)
            positions, which = positions[kept[positions]], which[kept[positions]]
            rows_at, sampled = indices(which), indices(tokens[positions])
            self._counts = self._counts.at[rows_at, sampled].add(1.0)
            self._seen[rows_at, sampled] = True

    def unstack(self) -> None:
        """Write the histories back to their rows."""
        for index, history in enumerate(self._histories):
            history.counts, history.seen = self._counts[index], self._seen[index]

    def state(self) -> list[mx.array]:
        """Return the arrays that steps change, (k, V)."""
        return [self._counts, self._seen] if self._histories else []


def _penalized(
    logits: mx.array,
    rows: mx.array,
    seen: mx.array,
    counts: mx.array,
    rates: tuple[mx.array, mx.array, mx.array],
) -> mx.array:
    """Apply repetition, presence and frequency `rates`, (k, 1) each, of the rows `rows` (k,)."""
    repetition, presence, frequency = rates
    chosen = logits[rows].astype(mx.float32)
    repeated = mx.where(chosen > 0, chosen / repetition, chosen * repetition)
    chosen = mx.where(seen, repeated, chosen)
    chosen = chosen - presence * (counts > 0) - frequency * counts
    changed = logits.astype(mx.float32)
    changed[rows] = chosen
    return changed
