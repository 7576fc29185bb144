"""Bias and penalties: what is added to logits before sampling, for the rows that have any, all at once."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from trouper.protocol.sampling import Sampling


class Bias:
    """logit_bias of all rows as one flat scatter-add."""

    def __init__(self, rows: Sequence[Sampling]) -> None:
        entries = [(place, token, value) for place, row in enumerate(rows) for token, value in row.logit_bias]
        self._any = bool(entries)
        if entries:
            places, tokens, values = zip(*entries, strict=True)
            self._places, self._tokens, self._values = mx.array(places), mx.array(tokens), mx.array(values, mx.float32)

    def __call__(self, logits: mx.array) -> mx.array:
        if not self._any:
            return logits
        return logits.at[self._places, self._tokens].add(self._values.astype(logits.dtype))


class MinTokens:
    """Ends that some rows may not draw yet. `rows`: (tokens before which none is drawn, the ends) of each."""

    def __init__(self, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        entries = [(place, token, least) for place, (least, ends) in enumerate(rows) for token in ends if least]
        table = np.array(entries, np.int64).reshape(-1, 3)
        self._places, self._tokens, self._least = table[:, 0], table[:, 1], table[:, 2]

    def __call__(self, logits: mx.array, drawn: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> mx.array:
        """logits (n, V); drawn (n,): tokens that each row has drawn so far."""
        if not self._places.size:
            return logits
        early = drawn[self._places].astype(np.int64) < self._least
        if not early.any():
            return logits
        changed = logits.astype(mx.float32)
        changed[mx.array(self._places[early]), mx.array(self._tokens[early])] = -mx.inf
        return changed


class History:
    """What one penalized row has seen: counts of generated tokens, and which tokens occurred at all. Both (V,)."""

    def __init__(self, prompt: np.ndarray[tuple[int], np.dtype[np.int32]], vocabulary: int) -> None:
        self.counts = mx.zeros((vocabulary,), mx.float32)
        seen = np.zeros(vocabulary, np.bool_)
        seen[prompt] = True
        self.seen = mx.array(seen)


class Penalties:
    """Penalties of one membership. Histories stay with their rows; here they are stacked for the step.

    Repetition (Keskar et al. 2019, CTRL): divides positive and multiplies negative logits of tokens in
    prompt or answer. Presence and frequency as OpenAI defines them, over the answer.
    """

    def __init__(self, rows: Sequence[Sampling], histories: Sequence[History | None]) -> None:
        kept = [
            (place, row, history) for place, (row, history) in enumerate(zip(rows, histories, strict=True)) if history
        ]
        self._histories = [history for _, _, history in kept]
        if kept:
            self._places = mx.array([place for place, _, _ in kept])
            self._repetition = mx.array([row.repetition_penalty for _, row, _ in kept])[:, None]
            self._presence = mx.array([row.presence_penalty for _, row, _ in kept])[:, None]
            self._frequency = mx.array([row.frequency_penalty for _, row, _ in kept])[:, None]
            self._counts = mx.stack([history.counts for history in self._histories])
            self._seen = mx.stack([history.seen for history in self._histories])
            self._each = mx.arange(len(kept))

    def __call__(self, logits: mx.array) -> mx.array:
        if not self._histories:
            return logits
        chosen = logits[self._places].astype(mx.float32)
        repeated = mx.where(chosen > 0, chosen / self._repetition, chosen * self._repetition)
        chosen = mx.where(self._seen, repeated, chosen)
        chosen = chosen - self._presence * (self._counts > 0) - self._frequency * self._counts
        changed = logits.astype(mx.float32)
        changed[self._places] = chosen
        return changed

    def took(self, tokens: mx.array) -> None:
        """The step's tokens, (n,) for all rows, before anybody reads them."""
        if self._histories:
            mine = tokens[self._places]
            self._counts = self._counts.at[self._each, mine].add(1.0)
            self._seen[self._each, mine] = True

    def unstack(self) -> None:
        """Give each row its history back, before the membership changes."""
        for place, history in enumerate(self._histories):
            history.counts, history.seen = self._counts[place], self._seen[place]

    def state(self) -> list[mx.array]:
        return [self._counts, self._seen] if self._histories else []
