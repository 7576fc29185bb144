"""Sampling a token for all rows at once, each with its own parameters.

Rows are split into groups by the work they need, once for each change of the set of rows, never for each step:

- greedy: argmax.
- narrow (1 <= top_k <= 64): the 64 best by two-stage selection, then top_k, top_p, min_p among them. Exact: the 64 best
  tokens lie in the 64 groups with the best maxima.
- wide: the whole vocabulary; sorted only where top_p or a large top_k needs the order.

Order of the filters as in Hugging Face transformers and vLLM: bias, penalties, temperature, top_k, top_p, min_p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trouper.engine.sampling.gumbel_noise import gumbel, mixed_seeds, stream_keys
from trouper.protocol.sampling import Sampling

Drawn = np.ndarray[tuple[int], np.dtype[np.uint64]]
RowIndices = NDArray[Any]
"""Indices of rows."""
CANDIDATES = 64
GROUP = 32
"""Tokens of one group in the first stage; 1536 groups for a vocabulary of 49152."""


def top_candidates(logits: mx.array, k: int = CANDIDATES) -> tuple[mx.array, mx.array]:
    """Select the k best of logits (n, V), best first: ids (n, k) uint32 and values (n, k) float32."""
    vocabulary = logits.shape[1]
    k = min(k, vocabulary)
    if vocabulary > 4 * k * GROUP:
        ids = _grouped_candidates(logits, k)
    else:
        ids = mx.argpartition(-logits, k - 1, axis=-1)[:, :k]
    values = mx.take_along_axis(logits, ids, axis=-1).astype(mx.float32)
    order = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(ids, order, axis=-1).astype(mx.uint32), mx.take_along_axis(values, order, axis=-1)


def _grouped_candidates(logits: mx.array, k: int) -> mx.array:
    rows, vocabulary = logits.shape
    groups = -(-vocabulary // GROUP)
    if groups * GROUP != vocabulary:
        logits = mx.pad(logits, [(0, 0), (0, groups * GROUP - vocabulary)], constant_values=-mx.inf)
    grouped = logits.reshape(rows, groups, GROUP)
    best = mx.argpartition(-grouped.max(axis=-1), k - 1, axis=-1)[:, :k]
    inside = mx.take_along_axis(grouped, best[:, :, None], axis=1).reshape(rows, k * GROUP)
    chosen = mx.argpartition(-inside, k - 1, axis=-1)[:, :k]
    group = mx.take_along_axis(best, chosen // GROUP, axis=-1)
    return mx.minimum(group * GROUP + chosen % GROUP, vocabulary - 1)


@attrs.frozen
class Columns:
    """Parameters of some rows as (n, 1) columns."""

    temperature: mx.array
    top_k: mx.array
    top_p: mx.array
    min_p: mx.array

    @classmethod
    def of(cls, rows: Sequence[Sampling], vocabulary: int) -> Columns:
        """Make the columns of rows. top_k 0 becomes the size of the vocabulary; min_p becomes its logarithm."""

        def column(values: list[float], dtype: mx.Dtype) -> mx.array:
            return mx.array(values, dtype)[:, None]

        return cls(
            column([row.temperature for row in rows], mx.float32),
            column([row.top_k or vocabulary for row in rows], mx.int32),
            column([row.top_p for row in rows], mx.float32),
            column([np.log(max(row.min_p, 1e-30)) for row in rows], mx.float32),
        )

    def spread(self, indices: mx.array) -> Columns:
        """Return the columns of the rows at `indices`, which may repeat."""
        return Columns(self.temperature[indices], self.top_k[indices], self.top_p[indices], self.min_p[indices])


def choose_narrow(logits: mx.array, columns: Columns, keys: mx.array) -> mx.array:
    """Sample logits (n, V) to tokens (n,) uint32, for rows with 1 <= top_k <= CANDIDATES."""
    ids, values = top_candidates(logits)
    scaled = values / columns.temperature
    keep = mx.arange(ids.shape[1]) < columns.top_k
    weights = mx.softmax(mx.where(keep, scaled, -mx.inf), axis=-1, precise=True)
    before = mx.cumsum(weights, axis=-1) - weights
    keep = keep & (before < columns.top_p) & (scaled >= scaled[:, :1] + columns.min_p)
    scores = mx.where(keep, scaled + gumbel(keys, ids), -mx.inf)
    return mx.take_along_axis(ids, mx.argmax(scores, axis=-1, keepdims=True), axis=-1)[:, 0]


def choose_wide(logits: mx.array, columns: Columns, keys: mx.array, *, ordered: bool) -> mx.array:
    """Sample logits (n, V) to tokens (n,) uint32 over the whole vocabulary; `ordered`: some row has a top_p or a top_k."""
    scaled = logits.astype(mx.float32) / columns.temperature
    floor = scaled.max(axis=-1, keepdims=True) + columns.min_p
    if ordered:
        floor = mx.maximum(floor, _nucleus_floor(scaled, columns))
    scores = scaled + gumbel(keys, mx.arange(scaled.shape[1], dtype=mx.uint32))
    return mx.argmax(mx.where(scaled >= floor, scores, -mx.inf), axis=-1).astype(mx.uint32)


def _nucleus_floor(scaled: mx.array, columns: Columns) -> mx.array:
    """Find the smallest value that top_k and then top_p keep, (n, 1)."""
    descending = -mx.sort(-scaled, axis=-1)
    ranks = mx.arange(scaled.shape[1])
    weights = mx.softmax(mx.where(ranks < columns.top_k, descending, -mx.inf), axis=-1, precise=True)
    before = mx.cumsum(weights, axis=-1) - weights
    kept = ((before < columns.top_p) & (ranks < columns.top_k)).sum(axis=-1, keepdims=True)
    return mx.take_along_axis(descending, mx.maximum(kept, 1) - 1, axis=-1)


Choose = Callable[[mx.array, Columns, mx.array], mx.array]


@attrs.frozen(eq=False)
class SamplingGroup:
    """Rows that are sampled by the same function."""

    rows: RowIndices
    columns: Columns
    choose: Choose
    """Function from (logits of these rows, their columns, their keys) to tokens (n,)."""


def sampling_groups(rows: Sequence[Sampling], vocabulary: int) -> list[SamplingGroup]:
    """Partition rows by the function that samples them."""
    kinds: dict[str, list[int]] = {"greedy": [], "narrow": [], "wide": [], "ordered": []}
    for index, row in enumerate(rows):
        kinds[_kind(row)].append(index)
    return [
        SamplingGroup(np.array(indices), Columns.of([rows[index] for index in indices], vocabulary), _chooser(kind))
        for kind, indices in kinds.items()
        if indices
    ]


def _kind(row: Sampling) -> str:
    if row.greedy:
        return "greedy"
    if 1 <= row.top_k <= CANDIDATES:
        return "narrow"
    return "ordered" if row.top_k > 0 or row.top_p < 1 else "wide"


def _chooser(kind: str) -> Choose:
    match kind:
        case "greedy":
            return lambda logits, _, __: mx.argmax(logits, axis=-1).astype(mx.uint32)
        case "narrow":
            return choose_narrow
        case _:
            return partial(choose_wide, ordered=kind == "ordered")


class BatchSampler:
    """Sampler of one set of rows, in the order of the logits. Built again when a row joins or leaves."""

    def __init__(self, rows: Sequence[Sampling], vocabulary: int) -> None:
        self._groups = sampling_groups(rows, vocabulary)
        self._seeds = mixed_seeds(row.seed for row in rows)
        self._greedy = all(row.greedy for row in rows)
        order = np.concatenate([group.rows for group in self._groups]) if rows else np.zeros(0, np.int64)
        self._back = mx.array(np.argsort(order).astype(np.int32))
        self._group_indices = [mx.array(group.rows.astype(np.int32)) for group in self._groups]

    def __call__(self, logits: mx.array, positions: Drawn, owners: RowIndices | None = None) -> mx.array:
        """Sample tokens (n,) uint32 from logits (n, V), after bias and penalties; positions (n,): how many tokens each row has
        drawn. With `owners` (m,): logits and positions of m draft positions, each of the row that `owners` names."""
        if owners is not None:
            return self._spread(logits, positions, owners)
        keys = self._keys(self._seeds, positions)
        if len(self._groups) == 1:
            return self._groups[0].choose(logits, self._groups[0].columns, keys)
        parts = [
            group.choose(logits[indices], group.columns, keys[indices])
            for group, indices in zip(self._groups, self._group_indices, strict=True)
        ]
        return mx.concatenate(parts)[self._back]

    def _spread(self, logits: mx.array, positions: Drawn, owners: RowIndices) -> mx.array:
        keys = self._keys(self._seeds[owners], positions)
        parts, order = [], []
        for group in self._groups:
            positions_of_group = np.flatnonzero(np.isin(owners, group.rows))
            if not len(positions_of_group):
                continue
            columns = group.columns.spread(
                mx.array(np.searchsorted(group.rows, owners[positions_of_group]).astype(np.int32))
            )
            if len(positions_of_group) == len(owners):
                return group.choose(logits, columns, keys)
            chosen = mx.array(positions_of_group.astype(np.int32))
            parts.append(group.choose(logits[chosen], columns, keys[chosen]))
            order.append(positions_of_group)
        return mx.concatenate(parts)[mx.array(np.argsort(np.concatenate(order)).astype(np.int32))]

    def _keys(self, seeds: NDArray[np.uint64], positions: Drawn) -> mx.array:
        return mx.zeros((len(seeds), 2), mx.uint32) if self._greedy else stream_keys(seeds, positions)
