"""State that the ranks of one model must agree on."""

# Rank 0 decides, followers replay (F19): a rank's results are a function of the plans. Tensors
# travel by `mx.distributed`, plans by TCP (`wire.py`), hence a rank that died, stalls or differs is
# found while engines are blocked in a collective. The hashes are for RankMirror, which predicts the
# state, and for the engines, which have the state. Whole arrays are hashed, in few operations a
# step.

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np
import xxhash

from trouper.protocol.splitmix import GOLDEN, mix64


@attrs.frozen
class Joined:
    """Rank in the group. `invitation`: the bytes that rank 0 sent through the group."""

    rank: int = 0
    size: int = 1
    invitation: bytes = b""

    @property
    def leads(self) -> bool:
        return self.rank == 0


@attrs.frozen
class Digest:
    """State before a plan's launch, by hashes that name the first difference. `rows`, `lengths`,
    `blocks` and `images` are predicted from plans, to find a difference before the collective
    hangs; `order` and `tokens` are rank 0's after step `settled`."""

    rows: int
    """`pairs` of row ids with 1 for a decoding row, 0 for one that prefills or was embedded."""
    lengths: int
    """`pairs` of row ids and tokens in KV. After `settled` a decoded row counts one token a
    step."""
    blocks: int
    """`set_hash` of the ids of stored blocks and snapshots."""
    images: int = 0
    """`set_hash` of the ids of images, encoded or between two slices."""
    settled: int = -1
    """Last answered step when the plan was sent; -1: none yet."""
    order: int = 0
    """`Stepped.order` of `settled`."""
    tokens: int = 0
    """`Stepped.tokens_hash` of `settled`."""


# In the order of comparison.
FIELDS = ("rows", "lengths", "blocks", "images", "order", "tokens")


class RankDiffers(Exception):
    def __init__(self, step: int, field: str, expected: int, found: int) -> None:
        super().__init__(
            f"step {step}: its {field} differ from what the plan expects ({found:016x}, not "
            f"{expected:016x})"
        )
        self.step, self.field, self.expected, self.found = step, field, expected, found


# Steps whose hashes a rank remembers; at most two steps are unanswered.
KEPT = 8


def forget_old(steps: dict[int, Any]) -> None:
    while len(steps) > KEPT:
        del steps[next(iter(steps))]


def compare(step: int, expected: Digest, found: Digest) -> None:
    """Raises `RankDiffers` for the first field that differs."""
    for field in FIELDS:
        expected_hash, found_hash = getattr(expected, field), getattr(found, field)
        if expected_hash != found_hash:
            raise RankDiffers(step, field, expected_hash, found_hash)


# -- hashes --------------------------------------------------------------------------------------

Ids = np.ndarray[Any, np.dtype[np.uint64]]


def ids_of(numbers: Iterable[int]) -> Ids:
    return np.fromiter(numbers, np.uint64)


def pairs(ids: Ids, values: np.ndarray[Any, Any]) -> int:
    """Hash of (id, value) pairs, independent of order."""
    return int(_mixed(_mixed(ids) + values.astype(np.uint64)).sum())


def set_hash(ids: Ids) -> int:
    """Hash of a set. Hashes of disjoint sets add modulo 2**64."""
    return int(_mixed(ids).sum())


def joined(known: int, ids: Iterable[int]) -> int:
    """`set_hash` after ids were added."""
    return (known + set_hash(ids_of(ids))) % 2**64


def parted(known: int, ids: Iterable[int]) -> int:
    """`set_hash` after ids were removed."""
    return (known - set_hash(ids_of(ids))) % 2**64


def sequence(numbers: Iterable[int], before: int = 0) -> int:
    """Hash of numbers in order, appended to a sequence with the hash `before`."""
    return xxhash.xxh3_64_intdigest(np.fromiter(numbers, np.int64).tobytes(), before)


def _mixed(values: Ids) -> Ids:
    return mix64(values + GOLDEN)
