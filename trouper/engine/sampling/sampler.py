"""Sampling a token for all rows at once, each with its own parameters. Filters follow bias,
penalties and DRY."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trouper.engine.platform.device import is_cpu
from trouper.protocol.sampling import Sampling
from trouper.protocol.splitmix import GOLDEN, mix64

Drawn = np.ndarray[tuple[int], np.dtype[np.uint64]]
RowIndices = NDArray[Any]
CANDIDATES = 64
MAX_CANDIDATES = 16384
GROUP = 32
"""Tokens of one group in the first stage."""
# Candidates of top_p alone on a CPU, where sorting a vocabulary of 49,152 takes 3.5 ms a row, and
# noise for all of it 3, the best 1,024 of it 0.3.
NUCLEUS = 1024
MASK = 0xFFFFFFFF
COIN = 0xFFFFFFFF
"""Token id, which no token has, under which a row draws whether XTC applies."""
SMALLEST = 2.0**-126  # The smallest normal float32. Some GPUs flush smaller values to 0.


def weights_of(scaled: mx.array, keep: mx.array) -> mx.array:
    """Softmax (n, k) of the kept ones of `scaled` (n, k); 0 elsewhere."""
    return mx.softmax(mx.where(keep, scaled, -mx.inf), axis=-1, precise=True)


def sigma_floor(scaled: mx.array, top_n_sigma: mx.array) -> mx.array:
    """Return the least of the logits `scaled` (n, V) that top_n_sigma (n, 1) keeps, (n, 1): the
    best minus so many standard deviations (Tang et al. 2024, Top-n-sigma). 0: minus infinity."""
    allowed = scaled > -mx.inf
    count = allowed.sum(axis=-1, keepdims=True)
    mean = mx.where(allowed, scaled, 0).sum(axis=-1, keepdims=True) / count
    squares = mx.where(allowed, (scaled - mean) ** 2, 0).sum(axis=-1, keepdims=True)
    floor = scaled.max(axis=-1, keepdims=True) - top_n_sigma * mx.sqrt(squares / count)
    return mx.where(top_n_sigma > 0, floor, -mx.inf)


def typical(weights: mx.array, keep: mx.array, typical_p: mx.array) -> mx.array:
    """Keep (n, k) the candidates of the most expected surprise, up to a weight of `typical_p` (n,
    1) (Meister et al. 2022, Locally Typical Sampling). 1: all."""
    logs = mx.log(mx.maximum(weights, SMALLEST))
    entropy = -(weights * logs).sum(axis=-1, keepdims=True)
    distance = mx.where(keep, mx.abs(-logs - entropy), mx.inf)
    order = mx.argsort(distance, axis=-1)
    ordered = mx.take_along_axis(weights, order, axis=-1)
    kept = mx.cumsum(ordered, axis=-1) - ordered < typical_p
    return keep & (mx.take_along_axis(kept, mx.argsort(order, axis=-1), axis=-1) | (typical_p >= 1))


def without_top_choices(
    weights: mx.array, keep: mx.array, threshold: mx.array, applies: mx.array
) -> mx.array:
    """XTC, "exclude top choices": where `applies` (n, 1), drop candidates of at least `threshold`
    (n, 1) except the lightest (https://github.com/oobabooga/text-generation-webui/pull/6335)."""
    above = keep & (weights >= threshold)
    rank = mx.cumsum(above.astype(mx.int32), axis=-1)
    return keep & ~(above & (rank < rank[:, -1:]) & applies)


def coins(keys: mx.array, probability: mx.array) -> mx.array:
    """Draw with `probability` (n, 1) by the keys (n, 2): (n, 1)."""
    uniform = (hashed(keys, mx.array([COIN], mx.uint32)).astype(mx.float32) + 0.5) * (1 / (1 << 32))
    return uniform <= probability


def top_candidates(logits: mx.array, k: int = CANDIDATES) -> tuple[mx.array, mx.array]:
    """Select the k best of logits (n, V), best first: ids (n, k) uint32 and values (n, k)
    float32."""
    vocabulary = logits.shape[1]
    k = min(k, vocabulary)
    if vocabulary > 4 * k * GROUP:
        ids, values = _grouped_candidates(logits, k)
    else:
        ids = mx.argpartition(-logits, k - 1, axis=-1)[:, :k]
        values = mx.take_along_axis(logits, ids, axis=-1)
    values = values.astype(mx.float32)
    order = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(ids, order, axis=-1).astype(mx.uint32), mx.take_along_axis(
        values, order, axis=-1
    )


def _grouped_candidates(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Select ids and values (n, k). Padding has the last token's id and minus infinity."""
    rows, vocabulary = logits.shape
    groups = -(-vocabulary // GROUP)
    if groups * GROUP != vocabulary:
        logits = mx.pad(logits, [(0, 0), (0, groups * GROUP - vocabulary)], constant_values=-mx.inf)
    grouped = logits.reshape(rows, groups, GROUP)
    best = mx.argpartition(-grouped.max(axis=-1), k - 1, axis=-1)[:, :k]
    inside = mx.take_along_axis(grouped, best[:, :, None], axis=1).reshape(rows, k * GROUP)
    chosen = mx.argpartition(-inside, k - 1, axis=-1)[:, :k]
    group = mx.take_along_axis(best, chosen // GROUP, axis=-1)
    ids = mx.minimum(group * GROUP + chosen % GROUP, vocabulary - 1)
    return ids, mx.take_along_axis(inside, chosen, axis=-1)


@attrs.frozen
class Columns:
    """Parameters of some rows as (n, 1) columns."""

    temperature: mx.array
    top_k: mx.array
    top_p: mx.array
    min_p: mx.array
    top_n_sigma: mx.array
    typical_p: mx.array
    xtc_probability: mx.array
    xtc_threshold: mx.array

    @classmethod
    def of(cls, rows: Sequence[Sampling], vocabulary: int) -> Columns:
        """Make the columns of rows. top_k 0 becomes the vocabulary; min_p becomes a logarithm;
        typical_p is at least `SMALLEST`."""

        def column(values: list[float], dtype: mx.Dtype) -> mx.array:
            return mx.array(values, dtype)[:, None]

        return cls(
            temperature=column([row.temperature for row in rows], mx.float32),
            top_k=column([row.top_k or vocabulary for row in rows], mx.int32),
            top_p=column([row.top_p for row in rows], mx.float32),
            min_p=column([np.log(max(row.min_p, 1e-30)) for row in rows], mx.float32),
            top_n_sigma=column([row.top_n_sigma for row in rows], mx.float32),
            typical_p=column([max(row.typical_p, SMALLEST) for row in rows], mx.float32),
            xtc_probability=column([row.xtc_probability for row in rows], mx.float32),
            xtc_threshold=column([row.xtc_threshold for row in rows], mx.float32),
        )

    def spread(self, indices: mx.array) -> Columns:
        """Return the columns of the rows at `indices`, which may repeat."""
        return Columns(*(getattr(self, field.name)[indices] for field in attrs.fields(Columns)))


def choose_narrow(
    logits: mx.array, columns: Columns, keys: mx.array, *, candidates: int = CANDIDATES
) -> mx.array:
    """Sample logits (n, V) to tokens (n,) uint32, for 1 <= top_k <= candidates."""
    ids, values = top_candidates(logits, candidates)
    scaled = values / columns.temperature
    keep = mx.arange(ids.shape[1]) < columns.top_k
    weights = weights_of(scaled, keep)
    before = mx.cumsum(weights, axis=-1) - weights
    keep = keep & (before < columns.top_p) & (scaled >= scaled[:, :1] + columns.min_p)
    return _draw(ids, scaled, keep, keys)


def _draw(ids: mx.array, scaled: mx.array, keep: mx.array, keys: mx.array) -> mx.array:
    """Draw one of the kept candidates (n, k): tokens (n,)."""
    scores = mx.where(keep, scaled + gumbel(keys, ids), -mx.inf)
    return mx.take_along_axis(ids, mx.argmax(scores, axis=-1, keepdims=True), axis=-1)[:, 0]


def choose_wide(
    logits: mx.array, columns: Columns, keys: mx.array, *, ordered: bool, counted: bool = False
) -> mx.array:
    """Sample logits (n, V) to tokens (n,) uint32 from the whole vocabulary. `ordered`: some row has
    top_p or top_k. `counted`: exactly top_k are kept where logits are equal."""
    scaled = logits.astype(mx.float32) / columns.temperature
    floor = scaled.max(axis=-1, keepdims=True) + columns.min_p
    if ordered:
        floor = mx.maximum(floor, _nucleus_floor(scaled, columns))
    scores = scaled + gumbel(keys, mx.arange(scaled.shape[1], dtype=mx.uint32))
    if counted:
        level, above = scaled == floor, (scaled > floor).sum(axis=-1, keepdims=True)
        excess = level & (mx.cumsum(level.astype(mx.int32), axis=-1) > columns.top_k - above)
        scores = mx.where(excess, -mx.inf, scores)
    return mx.argmax(mx.where(scaled >= floor, scores, -mx.inf), axis=-1).astype(mx.uint32)


def choose_nucleus(logits: mx.array, columns: Columns, keys: mx.array) -> mx.array:
    """As `choose_wide` with top_p alone, on a CPU: reads the logits, and sorts those rows' of which
    the best candidates do not hold top_p."""
    ids, values = top_candidates(logits, NUCLEUS)
    scaled = values / columns.temperature
    everything = logits.astype(mx.float32) / columns.temperature
    weights = mx.exp(scaled - mx.logsumexp(everything, axis=-1, keepdims=True))
    before = mx.cumsum(weights, axis=-1) - weights
    inside = before < columns.top_p
    floor = mx.where(inside, scaled, mx.inf).min(axis=-1, keepdims=True)
    keep = (scaled >= floor) & (scaled >= scaled[:, :1] + columns.min_p)
    tokens = _draw(ids, scaled, keep, keys).astype(mx.uint32)
    # Equal ones may follow the last candidate.
    rest = np.flatnonzero(np.array(floor <= scaled[:, -1:]))
    if len(rest) and ids.shape[1] < logits.shape[1]:
        rows = mx.array(rest.astype(np.int32))
        tokens[rows] = choose_wide(logits[rows], columns.spread(rows), keys[rows], ordered=True)
    return tokens


def _nucleus_floor(scaled: mx.array, columns: Columns) -> mx.array:
    """Find the smallest value that top_k and then top_p keep, (n, 1)."""
    descending = -mx.sort(-scaled, axis=-1)
    ranks = mx.arange(scaled.shape[1])
    weights = weights_of(descending, ranks < columns.top_k)
    before = mx.cumsum(weights, axis=-1) - weights
    kept = ((before < columns.top_p) & (ranks < columns.top_k)).sum(axis=-1, keepdims=True)
    return mx.take_along_axis(descending, mx.maximum(kept, 1) - 1, axis=-1)


def choose_filtered(
    logits: mx.array, columns: Columns, keys: mx.array, *, narrow: bool
) -> mx.array:
    """Sample logits (n, V) to tokens (n,) uint32 through all filters. `narrow`: all top_k are in 1
    .. CANDIDATES."""
    ids, values = top_candidates(logits) if narrow else _descending(logits)
    scaled = values / columns.temperature
    # The temperature comes first as in Hugging Face transformers and vLLM, then the filters follow
    # each other as in llama.cpp: top_n_sigma, top_k, typical_p, top_p, min_p, XTC.
    floor = sigma_floor(logits.astype(mx.float32) / columns.temperature, columns.top_n_sigma)
    keep = (mx.arange(ids.shape[1]) < columns.top_k) & (scaled >= floor)
    keep = typical(weights_of(scaled, keep), keep, columns.typical_p)
    weights = weights_of(scaled, keep)
    best = mx.where(keep, scaled, -mx.inf).max(axis=-1, keepdims=True)
    # The best one left need not be the first: typical_p may have dropped those before it.
    nucleus = (
        (mx.cumsum(weights, axis=-1) - weights < columns.top_p)
        | (columns.top_p >= 1)
        | (scaled >= best)
    )
    keep = keep & nucleus & (scaled >= best + columns.min_p)
    applies = coins(keys, columns.xtc_probability)
    keep = without_top_choices(weights_of(scaled, keep), keep, columns.xtc_threshold, applies)
    return _draw(ids, scaled, keep, keys)


def _descending(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Sort logits (n, V), best first: ids (n, V) uint32 and values (n, V) float32."""
    values = logits.astype(mx.float32)
    ids = mx.argsort(-values, axis=-1)
    return ids.astype(mx.uint32), mx.take_along_axis(values, ids, axis=-1)


Choose = Callable[[mx.array, Columns, mx.array], mx.array]


@attrs.frozen(eq=False)
class SamplingGroup:
    """Rows that are sampled by the same function."""

    rows: RowIndices
    columns: Columns
    choose: Choose
    """From (logits, columns, keys) of these rows to tokens (n,)."""


def sampling_groups(rows: Sequence[Sampling], vocabulary: int) -> list[SamplingGroup]:
    kinds: dict[Kind, list[int]] = {}
    for index, row in enumerate(rows):
        kinds.setdefault(_kind(row, vocabulary), []).append(index)
    return [
        SamplingGroup(
            np.array(indices),
            Columns.of([rows[index] for index in indices], vocabulary),
            _chooser(kind),
        )
        for kind, indices in sorted(kinds.items())
    ]


# Rows are split into groups by the work they need, once for each change of the set of rows:
#
# - greedy: argmax.
# - narrow (1 <= top_k <= 64): the 64 best by two-stage selection, then top_k, top_p, min_p among
#   them. Exact: the 64 best tokens lie in the 64 groups with the best maxima. With a larger top_k
#   the 256, 1024, 4096 or 16384 best: the number depends on the row's own top_k alone, so that
#   equal logits at the boundary are chosen as if the row were alone.
# - wide: the whole vocabulary; sorted only where top_p or a still larger top_k needs the order. On
#   a CPU top_p alone looks among the best first, which waits for the logits.
# - filtered: rows with top_n_sigma, typical_p or XTC; the 64 best where top_k is as narrow, else
#   the sorted vocabulary.
Kind = tuple[str, int]
"""Function that samples a row, and the number of candidates (0: the whole vocabulary)."""


def _kind(row: Sampling, vocabulary: int) -> Kind:
    """Choose the cheapest function that samples the row exactly, and the number of candidates."""
    if row.greedy:
        return "greedy", 0
    candidates = _candidates(row.top_k) if row.top_k else 0
    needs_all_filters = row.top_n_sigma > 0 or row.typical_p < 1 or row.xtc_probability > 0
    if needs_all_filters:
        return "filtered", candidates if candidates == CANDIDATES else 0
    if candidates == CANDIDATES or 0 < candidates <= min(MAX_CANDIDATES, vocabulary // 4):
        return "narrow", candidates
    if 0 < row.top_k < vocabulary:
        return "counted", 0
    if row.top_p < 1:
        return ("nucleus" if is_cpu() else "ordered"), 0
    return "wide", 0


def _candidates(top_k: int) -> int:
    """Round top_k up to CANDIDATES times a power of 4, for few functions."""
    return CANDIDATES << 2 * -(-(-(-top_k // CANDIDATES) - 1).bit_length() // 2)


def _chooser(kind: Kind) -> Choose:
    match kind:
        case "greedy", _:
            return lambda logits, _, __: mx.argmax(logits, axis=-1).astype(mx.uint32)
        case "nucleus", _:
            return choose_nucleus
        case "narrow", candidates:
            return partial(choose_narrow, candidates=candidates)
        case "filtered", candidates:
            return partial(choose_filtered, narrow=candidates > 0)
        case name, _:
            return partial(choose_wide, ordered=name != "wide", counted=name == "counted")


class BatchSampler:
    def __init__(self, rows: Sequence[Sampling], vocabulary: int) -> None:
        self._groups = sampling_groups(rows, vocabulary)
        self._seeds = mixed_seeds(row.seed for row in rows)
        self._greedy = all(row.greedy for row in rows)
        self.reads_logits = any(group.choose is choose_nucleus for group in self._groups)
        """Whether sampling waits for the pass."""
        order = (
            np.concatenate([group.rows for group in self._groups])
            if rows
            else np.zeros(0, np.int64)
        )
        self._back = mx.array(np.argsort(order).astype(np.int32))
        self._group_indices = [mx.array(group.rows.astype(np.int32)) for group in self._groups]

    def __call__(
        self, logits: mx.array, positions: Drawn, owners: RowIndices | None = None
    ) -> mx.array:
        """Sample tokens (n,) uint32 from logits (n, V), after bias and penalties. positions (n,):
        number of tokens drawn. `owners` (m,): the row of each of m draft positions."""
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
        return (
            mx.zeros((len(seeds), 2), mx.uint32) if self._greedy else stream_keys(seeds, positions)
        )


# Gumbel noise keyed by (seed, position, token id): the same draw in any batch, on any rank.
# Sampling is argmax(logits / temperature + noise) (Maddison, Tarlow, Minka: A* Sampling, 2014),
# without a generator whose state rows would share.


def mixed_seeds(seeds: Iterable[int]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer of any integers, (n,) uint64."""
    return mix64(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64))


def stream_keys(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> mx.array:
    """Make a key for each seed and position, both (n,) uint64: (n, 2) uint32, by SplitMix64 on the
    host."""
    value = mix64(seeds ^ (positions + np.uint64(1)) * GOLDEN)
    halves = np.stack([value & np.uint64(MASK), value >> np.uint64(32)], axis=1)
    return mx.array(halves.astype(np.uint32))


def gumbel(keys: mx.array, ids: mx.array) -> mx.array:
    """Gumbel noise (n, k) float32 of keys (n, 2) uint32 and ids (n, k) or (k,) uint32."""
    return gumbel_of(hashed(keys, ids))


def hashed(keys: mx.array, ids: mx.array) -> mx.array:
    """Hash ids (n, k) or (k,) uint32 to (n, k) uint32 by MurmurHash3's finalizer (Appleby 2011),
    keyed twice by keys (n, 2)."""
    bits = (ids * 0x9E3779B1) ^ keys[:, :1]
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = ((bits ^ (bits >> 13)) + keys[:, 1:]) * 0xC2B2AE35
    bits = (bits ^ (bits >> 15)) * 0x27D4EB2F
    return bits ^ (bits >> 16)


def gumbel_of(bits: mx.array) -> mx.array:
    """Map 32 random bits to a Gumbel variate in [-2.9, 22.9], float32: minus the logarithm of an
    exponential waiting time."""
    # The shortest times win and need a float's full precision: the logarithm of a float near 1 has
    # none.
    uniform = mx.minimum((bits.astype(mx.float32) + 0.5) * (1 / (1 << 32)), 1 - 2**-24)
    wait = mx.where(uniform < 2**-10, uniform + 0.5 * uniform * uniform, -mx.log(1 - uniform))
    return -mx.log(wait)
