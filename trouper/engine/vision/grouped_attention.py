"""Attention of an encoder's patches within groups: windows of a layer, or tiles of an image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import mlx.core as mx

from trouper.engine.vision.bounded_attention import attend
from trouper.engine.vision.tower import Rotation

Lengths = tuple[int, ...]
"""Patches of each group, one behind another."""


class Places(NamedTuple):
    """Facts of an image that layers need."""

    rotation: Rotation
    groups: Lengths
    """Patches attend to those of their group."""


class GroupedHeads(NamedTuple):
    """Queries, keys and values (1, heads, patches, dim of a head) of a layer."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    groups: Lengths


def attend_in_groups(heads: GroupedHeads, patches: slice) -> mx.array:
    """Attention of some patches to their groups: (1, heads, n, dim). Waits for the device as
    `attend`."""
    start, count = patches.start, heads.queries.shape[2]
    stop = min(patches.stop, count)
    attended = [
        _attend_equal(heads, run_start, length, slice(max(start, run_start), min(stop, run_stop)))
        for run_start, run_stop, length in _equal_runs(heads.groups)
        if run_start < stop and start < run_stop
    ]
    return mx.concatenate(attended, axis=2)


def _equal_runs(groups: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield begin, end and group's length of groups of like length behind each other."""
    start = 0
    for length, equal in groupby(groups):
        stop = start + length * sum(1 for _ in equal)
        yield start, stop, length
        start = stop


def _attend_equal(heads: GroupedHeads, run_start: int, length: int, patches: slice) -> mx.array:
    """`patches` lie in a run of groups of one length that begins at `run_start`."""
    first = run_start + (patches.start - run_start) // length * length
    last = run_start + -(-(patches.stop - run_start) // length) * length
    if (first, last) == (patches.start, patches.stop) and last - first > length:
        return _attend_together(heads, patches, length)
    attended = []
    for start in range(first, last, length):
        own = slice(start, start + length)
        some = slice(max(patches.start, start) - start, min(patches.stop, own.stop) - start)
        queries, keys, values = (
            part[:, :, own] for part in (heads.queries, heads.keys, heads.values)
        )
        attended.append(attend(queries, keys, values, some))
    return mx.concatenate(attended, axis=2)


def _attend_together(heads: GroupedHeads, patches: slice, length: int) -> mx.array:
    """Whole groups are a batch: a window alone is too little work for a GPU."""
    _, count, _, dim = heads.queries.shape
    groups = (patches.stop - patches.start) // length
    queries, keys, values = (
        part[0, :, patches].reshape(count, groups, length, dim).transpose(1, 0, 2, 3)
        for part in (heads.queries, heads.keys, heads.values)
    )
    attended = attend(queries, keys, values, slice(0, length))
    return attended.transpose(1, 0, 2, 3).reshape(1, count, -1, dim)
