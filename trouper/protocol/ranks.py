"""State that the ranks of one model must agree on, and the detection of differences.

Rank 0 decides, followers replay (F19): everything that a rank computes is a function of the ordered
stream of plans. Tensors travel by `mx.distributed`, inside the engines; plans travel by TCP
(`wire.py`), so that a rank that died, stalls or differs is found while the engines are blocked in a
collective, which nobody can cancel.

The hash functions are defined here, for RankMirror, which predicts the state, and for the engines,
which have it. They hash whole arrays, so a step costs a few operations, however many rows it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np
import xxhash

from trouper.protocol.splitmix import GOLDEN, mix64


@attrs.frozen
class Joined:
    """Rank of this process in the group. `invitation`: the bytes that rank 0 sent to all ranks
    through the group itself."""

    rank: int = 0
    size: int = 1
    invitation: bytes = b""

    @property
    def leads(self) -> bool:
        return self.rank == 0


@attrs.frozen
class Digest:
    """The state that a rank must have before it launches a plan and applies its changes. Each field
    is a hash, so that the first one that differs can be named. `rows`, `lengths` and `blocks` are
    predicted from the plans, so that a difference is found before the collective that it would
    hang; `order` and `tokens` are rank 0's own after step `settled`."""

    rows: int
    """`pairs` of the rows' ids with 1 for a row that decodes, and 0 for one that prefills or was
    embedded."""
    lengths: int
    """`pairs` of the rows' ids and the tokens in their KV. For steps after `settled` a decoded row
    counts one token each, since rank 0 does not know yet which drafts were accepted."""
    blocks: int
    """`set_hash` of the ids of stored blocks and snapshots."""
    settled: int = -1
    """Last step whose answer rank 0 had when it sent the plan; -1: none yet."""
    order: int = 0
    """Hash of the assignment of rows to slots: `Stepped.order` of step `settled`."""
    tokens: int = 0
    """Hash of all tokens sampled so far: `Stepped.tokens_hash` of step `settled`."""


FIELDS = ("rows", "lengths", "blocks", "order", "tokens")
"""Fields in the order in which they are compared."""


class RankDiffers(Exception):
    """A rank's state is not what a plan expects. The rank did not launch the plan, and the group
    ends."""

    def __init__(self, step: int, field: str, expected: int, found: int) -> None:
        super().__init__(
            f"step {step}: its {field} differ from what the plan expects ({found:016x}, not "
            f"{expected:016x})"
        )
        self.step, self.field, self.expected, self.found = step, field, expected, found


KEPT = 8
"""Number of steps whose hashes a rank remembers. A plan is sent when at most two steps are
unanswered."""


def forget_old(steps: dict[int, Any]) -> None:
    """Keep the last `KEPT` steps. Entries are counted, not compared by step number: numbers jump,
    because empty steps are never sent."""
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
    """Hash of (id, value) pairs, independent of their order."""
    return int(_mixed(_mixed(ids) + values.astype(np.uint64)).sum())


def set_hash(ids: Ids) -> int:
    """Hash of a set of ids. Sums of disjoint sets are added modulo 2**64, so a set that changes is
    not hashed again."""
    return int(_mixed(ids).sum())


def joined(known: int, ids: Iterable[int]) -> int:
    """`set_hash` of a set with the hash `known` after these ids were added."""
    return (known + set_hash(ids_of(ids))) % 2**64


def parted(known: int, ids: Iterable[int]) -> int:
    """`set_hash` of a set with the hash `known` after these ids were removed."""
    return (known - set_hash(ids_of(ids))) % 2**64


def sequence(numbers: Iterable[int], before: int = 0) -> int:
    """Hash of numbers in their order, appended to a sequence with the hash `before`."""
    return xxhash.xxh3_64_intdigest(np.fromiter(numbers, np.int64).tobytes(), before)


def _mixed(values: Ids) -> Ids:
    return mix64(values + GOLDEN)
