"""What the ranks of one model must agree on, and how it is found that they do not.

Rank 0 decides, followers replay (F19): everything that a rank computes is a function of the ordered stream of plans.
Tensors travel by `mx.distributed`, inside the engines; plans travel by TCP (`wire.py`), so that a rank that died, stalls
or differs is found while the engines are blocked in a collective, which nobody can cancel.

The hashes are made here, for those who foretell a state (RankMirror's ledger) and for those who have it (engines). They
are of whole arrays: a step costs a few operations, however many rows it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np
import xxhash


@attrs.frozen
class Joined:
    """This process's place in the group of ranks. `invitation`: what rank 0 gave everybody through the group itself."""

    rank: int = 0
    size: int = 1
    invitation: bytes = b""

    @property
    def leads(self) -> bool:
        return self.rank == 0


@attrs.frozen
class Digest:
    """What a rank's state must be when it is about to launch a plan, before anything that the plan changes; a hash for
    each field, so that the first that differs can be named. `rows`, `lengths` and `blocks` are foretold by the plans, so
    that a difference is found before the collective that it would hang; `order` and `tokens` are rank 0's own after step
    `settled`."""

    rows: int
    """`pairs` of the rows' ids and 1 for who decodes, 0 for who prefills (or was embedded)."""
    lengths: int
    """`pairs` of the rows' ids and the tokens in their KV. Of steps after `settled` a decoded row counts one token each,
    although its drafts may have been accepted: what came of them nobody has told rank 0 yet."""
    blocks: int
    """`members` of the ids of stored blocks and snapshots."""
    settled: int = -1
    """The last step whose answer rank 0 had when it sent the plan; -1: none yet."""
    order: int = 0
    """Which row lies in which slot: `Stepped.order` of step `settled`."""
    tokens: int = 0
    """All tokens sampled so far: `Stepped.tokens_hash` of step `settled`."""


FIELDS = ("rows", "lengths", "blocks", "order", "tokens")
"""In the order in which they are compared."""


class RankDiffers(Exception):
    """A rank's state is not what a plan expects. It did not launch the plan. The group ends."""

    def __init__(self, step: int, field: str, expected: int, found: int) -> None:
        super().__init__(
            f"step {step}: its {field} differ from what the plan expects ({found:016x}, not {expected:016x})"
        )
        self.step, self.field, self.expected, self.found = step, field, expected, found


KEPT = 8
"""Steps whose hashes a rank remembers: a plan is sent when at most two steps are unanswered."""


def forget_old(steps: dict[int, Any]) -> None:
    """By how many came since, not by their numbers: those that had nothing to do were never sent, so numbers jump."""
    while len(steps) > KEPT:
        del steps[next(iter(steps))]


def compare(step: int, expected: Digest, found: Digest) -> None:
    """Raises `RankDiffers` for the first field that differs."""
    for field in FIELDS:
        wanted, got = getattr(expected, field), getattr(found, field)
        if wanted != got:
            raise RankDiffers(step, field, wanted, got)


# -- hashes ------------------------------------------------------------------------------------------

Ids = np.ndarray[Any, np.dtype[np.uint64]]


def ids_of(numbers: Iterable[int]) -> Ids:
    return np.fromiter(numbers, np.uint64)


def pairs(ids: Ids, values: np.ndarray[Any, Any]) -> int:
    """Of (id, value) pairs, in whatever order they come."""
    return int(_mixed(_mixed(ids) + values.astype(np.uint64)).sum())


def members(ids: Ids) -> int:
    """Of a set of ids. Sums of disjoint sets are added modulo 2**64, so a set that changes is not hashed again."""
    return int(_mixed(ids).sum())


def joined(known: int, ids: Iterable[int]) -> int:
    """`members` of what had the hash `known` and now has these, too."""
    return (known + members(ids_of(ids))) % 2**64


def parted(known: int, ids: Iterable[int]) -> int:
    """`members` of what had the hash `known` and has lost these."""
    return (known - members(ids_of(ids))) % 2**64


def sequence(numbers: Iterable[int], before: int = 0) -> int:
    """Of numbers in their order, after whatever had the hash `before`."""
    return xxhash.xxh3_64_intdigest(np.fromiter(numbers, np.int64).tobytes(), before)


def _mixed(values: Ids) -> Ids:
    """splitmix64 (Steele, Lea, Flood 2014): each bit of the input changes half of the output's."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
