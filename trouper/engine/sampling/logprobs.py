from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import cast

import attrs
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trouper.engine.sampling.sampler import top_candidates
from trouper.protocol.plans import RowId
from trouper.protocol.replies import TokenLogprobs

NONE: Mapping[RowId, tuple[int, ...]] = {}
KeptMask = NDArray[np.bool_]


@attrs.frozen
class PendingLogprobs:
    """Log-probabilities of the rows at `indices`. Lazy: (n,) of sampled tokens, (n, k) ids and
    values of the most likely."""

    indices: tuple[int, ...]
    rows: tuple[RowId, ...]
    top_counts: tuple[int, ...]
    sampled_logprobs: mx.array
    tokens: mx.array
    top_ids: mx.array
    top: mx.array
    named: tuple[tuple[int, ...], ...] = ()
    """Tokens that each row names in place of the most likely."""
    named_values: mx.array | None = None
    """(n, m); None if no row names any."""

    def arrays(self) -> list[mx.array]:
        named = [] if self.named_values is None else [self.named_values]
        return [self.sampled_logprobs, self.tokens, self.top_ids, self.top, *named]

    def read(self, kept: KeptMask | None = None) -> tuple[tuple[RowId, TokenLogprobs], ...]:
        sampled = cast(list[float], self.sampled_logprobs.tolist())
        tokens = cast(list[int], self.tokens.tolist())
        ids = cast(list[list[int]], self.top_ids.tolist())
        values = cast(list[list[float]], self.top.tolist())
        if self.named_values is not None:
            of_named = cast(list[list[float]], self.named_values.tolist())
            for i, own in enumerate(self.named):
                if own:
                    ids[i], values[i] = list(own), of_named[i][: len(own)]
        counts = [
            len(own) or k
            for own, k in zip(self.named or ((),) * len(self.rows), self.top_counts, strict=True)
        ]
        return tuple(
            (
                row,
                TokenLogprobs(
                    tokens[i], sampled[i], array("i", ids[i][:k]), array("f", values[i][:k])
                ),
            )
            for i, (row, k) in enumerate(zip(self.rows, counts, strict=True))
            if kept is None or kept[self.indices[i]]
        )


def logprobs_of(
    logits: mx.array,
    tokens: mx.array,
    rows: Sequence[tuple[int, RowId, int]],
    named: Mapping[RowId, tuple[int, ...]] = NONE,
) -> PendingLogprobs | None:
    """Compute log-probabilities of the raw logits (n, V). `rows`: (index into the logits, row id,
    number of most likely tokens); `named`: tokens in place of the most likely."""
    if not rows:
        return None
    indices = mx.array([index for index, _, _ in rows])
    chosen = logits[indices].astype(mx.float32)
    total = mx.logsumexp(chosen, axis=-1, keepdims=True)
    taken = tokens[indices]
    ids, values = top_candidates(chosen)
    named_values = None
    if named:
        of_rows = tuple(named.get(row, ()) for _, row, _ in rows)
        padded = np.zeros((len(rows), max(map(len, of_rows))), np.int32)
        for i, own in enumerate(of_rows):
            padded[i, : len(own)] = own
        named_values = mx.take_along_axis(chosen, mx.array(padded), axis=-1) - total
    return PendingLogprobs(
        indices=tuple(index for index, _, _ in rows),
        rows=tuple(row for _, row, _ in rows),
        top_counts=tuple(count for _, _, count in rows),
        sampled_logprobs=(mx.take_along_axis(chosen, taken[:, None], axis=-1) - total)[:, 0],
        tokens=taken,
        top_ids=ids,
        top=values - total,
        named=of_rows if named else (),
        named_values=named_values,
    )
