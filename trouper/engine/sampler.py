"""Choosing a token for every row at once, each with its own parameters.

The work is split by what rows need, once for each change of membership, never for each step:

- greedy: argmax.
- narrow (1 <= top_k <= 64): the 64 best by two-stage selection, then top_k, top_p, min_p among them. Exact: the 64 best
  tokens lie in the 64 groups with the best maxima.
- wide: the whole vocabulary; sorted only where top_p or a large top_k needs the order.

Order of the filters as in Hugging Face transformers and vLLM: bias, penalties, temperature, top_k, top_p, min_p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx
import numpy as np

from trouper.engine.noise import gumbel, mix, stream_keys
from trouper.protocol.sampling import Sampling

CANDIDATES = 64
GROUP = 32
"""Tokens of one group in the first stage; 1536 groups for a vocabulary of 49152."""


def top_candidates(logits: mx.array, k: int = CANDIDATES) -> tuple[mx.array, mx.array]:
    """(n, V) to the k best, best first: ids (n, k) uint32 and values (n, k) float32."""
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
    places = mx.argpartition(-inside, k - 1, axis=-1)[:, :k]
    group = mx.take_along_axis(best, places // GROUP, axis=-1)
    return mx.minimum(group * GROUP + places % GROUP, vocabulary - 1)


@attrs.frozen
class Columns:
    """Parameters of some rows as (n, 1) columns."""

    temperature: mx.array
    top_k: mx.array
    top_p: mx.array
    min_p: mx.array

    @classmethod
    def of(cls, rows: Sequence[Sampling], vocabulary: int) -> Columns:
        def column(values: list[float], dtype: mx.Dtype) -> mx.array:
            return mx.array(values, dtype)[:, None]

        return cls(
            column([row.temperature for row in rows], mx.float32),
            column([row.top_k or vocabulary for row in rows], mx.int32),
            column([row.top_p for row in rows], mx.float32),
            column([np.log(max(row.min_p, 1e-30)) for row in rows], mx.float32),
        )


def choose_narrow(logits: mx.array, columns: Columns, keys: mx.array) -> mx.array:
    """(n, V) to (n,) uint32, for rows with 1 <= top_k <= CANDIDATES."""
    ids, values = top_candidates(logits)
    scaled = values / columns.temperature
    keep = mx.arange(ids.shape[1]) < columns.top_k
    weights = mx.softmax(mx.where(keep, scaled, -mx.inf), axis=-1, precise=True)
    before = mx.cumsum(weights, axis=-1) - weights
    keep = keep & (before < columns.top_p) & (scaled >= scaled[:, :1] + columns.min_p)
    scores = mx.where(keep, scaled + gumbel(keys, ids), -mx.inf)
    return mx.take_along_axis(ids, mx.argmax(scores, axis=-1, keepdims=True), axis=-1)[:, 0]


def choose_wide(logits: mx.array, columns: Columns, keys: mx.array, *, ordered: bool) -> mx.array:
    """(n, V) to (n,) uint32 over the whole vocabulary; `ordered` when some row has a top_p or a top_k."""
    scaled = logits.astype(mx.float32) / columns.temperature
    floor = scaled.max(axis=-1, keepdims=True) + columns.min_p
    if ordered:
        floor = mx.maximum(floor, _nucleus_floor(scaled, columns))
    scores = scaled + gumbel(keys, mx.arange(scaled.shape[1], dtype=mx.uint32))
    return mx.argmax(mx.where(scaled >= floor, scores, -mx.inf), axis=-1).astype(mx.uint32)


def _nucleus_floor(scaled: mx.array, columns: Columns) -> mx.array:
    """(n, 1): the smallest value that top_k and then top_p keep."""
    descending = -mx.sort(-scaled, axis=-1)
    ranks = mx.arange(scaled.shape[1])
    weights = mx.softmax(mx.where(ranks < columns.top_k, descending, -mx.inf), axis=-1, precise=True)
    before = mx.cumsum(weights, axis=-1) - weights
    kept = ((before < columns.top_p) & (ranks < columns.top_k)).sum(axis=-1, keepdims=True)
    return mx.take_along_axis(descending, mx.maximum(kept, 1) - 1, axis=-1)


Choose = Callable[[mx.array, mx.array], mx.array]


@attrs.frozen
class Tier:
    """Some of the rows, and how they choose."""

    rows: tuple[int, ...]
    choose: Choose
    """(logits of these rows, their keys) to tokens (n,)."""


def tiers_of(rows: Sequence[Sampling], vocabulary: int) -> list[Tier]:
    kinds: dict[str, list[int]] = {"greedy": [], "narrow": [], "wide": [], "ordered": []}
    for place, row in enumerate(rows):
        kinds[_kind(row)].append(place)
    return [
        Tier(tuple(places), _chooser(kind, Columns.of([rows[place] for place in places], vocabulary)))
        for kind, places in kinds.items()
        if places
    ]


def _kind(row: Sampling) -> str:
    if row.greedy:
        return "greedy"
    if 1 <= row.top_k <= CANDIDATES:
        return "narrow"
    return "ordered" if row.top_k > 0 or row.top_p < 1 else "wide"


def _chooser(kind: str, columns: Columns) -> Choose:
    match kind:
        case "greedy":
            return lambda logits, _: mx.argmax(logits, axis=-1).astype(mx.uint32)
        case "narrow":
            return lambda logits, keys: choose_narrow(logits, columns, keys)
        case _:
            return lambda logits, keys: choose_wide(logits, columns, keys, ordered=kind == "ordered")


class BatchSampler:
    """The sampler of one membership: rows in the order of logits. Built anew when a row joins or leaves."""

    def __init__(self, rows: Sequence[Sampling], vocabulary: int) -> None:
        self._tiers = tiers_of(rows, vocabulary)
        self._seeds = np.array([mix(row.seed) for row in rows], np.uint64)
        self._no_keys = mx.zeros((len(rows), 2), mx.uint32) if all(row.greedy for row in rows) else None
        together = [place for tier in self._tiers for place in tier.rows]
        self._back = mx.array(np.argsort(together).astype(np.int32))

    def __call__(self, logits: mx.array, positions: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> mx.array:
        """logits (n, V), after bias and penalties; positions (n,): how many tokens each row has drawn. Tokens (n,) uint32."""
        keys = stream_keys(self._seeds, positions) if self._no_keys is None else self._no_keys
        if len(self._tiers) == 1:
            return self._tiers[0].choose(logits, keys)
        parts = []
        for tier in self._tiers:
            rows = mx.array(tier.rows)
            parts.append(tier.choose(logits[rows], keys[rows]))
        return mx.concatenate(parts)[self._back]
