"""Size of a model's KV, and whether it can be cached beyond the life of its row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import NamedTuple

import attrs

FIRST_BANK = 512
"""Maximum number of tokens of rows in the bank of level 0; each level has twice as many."""
SHARED_TOKENS = 2**14
"""Maximum level of banks that rows share, as a number of tokens; a longer row has a bank of its
own. Rows of different lengths in one bank need a mask, for which MLX has no fused attention on
CUDA: three rows of 60,000 tokens took 69 ms of a step on an H200. Shorter rows share one, since
each bank costs operations in every layer."""
CAPACITY_STEP = 256
"""Minimum difference of two capacities of a row's buffer, in tokens. mlx-lm's caches grow by as
many."""


def kv_capacity(tokens: int, step: int = CAPACITY_STEP) -> int:
    """Capacity of the buffer of a row of `tokens` tokens: a multiple of `step`, and of an eighth to
    a quarter of the result, so that rows have few different capacities. At most a quarter more than
    `tokens`, or `step`."""
    unit = _capacity_unit(tokens, step)
    return -(-tokens // unit) * unit


def _capacity_unit(tokens: int, step: int) -> int:
    """The number whose multiples are the capacities of rows of about `tokens` tokens."""
    return max(step, 1 << max((tokens - 1).bit_length() - 3, 0))


def bank_level(tokens: int, first_bank: int = FIRST_BANK) -> int:
    """Level of the bank that a row of `tokens` tokens belongs to: rows of one bank share a buffer
    as long as its longest row. A row belongs to the next level from 15/16 of the maximum on, so
    that rows of like length can move one after another."""
    return lowest_level(-(-16 * tokens // 15), first_bank)


def longest_of(level: int, first_bank: int = FIRST_BANK) -> int:
    """Maximum number of tokens of a row that belongs to the bank of this level."""
    return 15 * (first_bank << level) // 16


def lowest_level(tokens: int, first_bank: int = FIRST_BANK) -> int:
    """Lowest level of a bank in which a row of `tokens` tokens may be: it stays for some steps
    while others move."""
    return (max(tokens - 1, 0) // first_bank).bit_length()


@attrs.frozen(kw_only=True)
class BankStats:
    """A bank of the engine at one moment: rows of like length, which share buffers."""

    max_tokens: int | None = None
    """Length in tokens beyond which a row moves to another bank; None: rows of any length share the
    bank."""
    capacity_tokens: int = 0
    """Tokens that a slot has room for: the mean over the layers, whose buffers grow at different
    moments. 0: no buffers yet, or rows whose states have no length."""
    rows: int = 0
    slots: int = 0
    """Rows that the buffers have room for."""
    bytes: int = 0
    """Bytes of the buffers, used or not, and of the rows' recurrent states."""


class KvUsage(NamedTuple):
    """What a row counts among the rows of a batch. It stays the same while the row grows by less
    than `lasts` tokens."""

    level: int
    """Level of the bank in which the row may be soon."""
    left: int | None
    """Level of the bank in which it may still be; None: the same."""
    reserved: int
    """Number of tokens that it may have soon, or some that take as many bytes."""
    lasts: int = 0


NO_USAGE = KvUsage(0, None, 0)


class BatchLengths:
    """Lengths of rows by the level of their bank. What the rows take together follows from these,
    also with one more row, without another look at all of them."""

    def __init__(self, usages: Iterable[KvUsage] = ()) -> None:
        self.by_level = defaultdict[int, list[int]](list)
        """Tokens that each row may have soon."""
        self.shared = set[int]()
        """Levels of banks in which rows may be that will soon be in another."""
        self._add(usages)

    def with_row(self, usage: KvUsage) -> BatchLengths:
        """These rows and one more."""
        batch = BatchLengths()
        batch.by_level.update({level: lengths.copy() for level, lengths in self.by_level.items()})
        batch.shared |= self.shared
        batch._add((usage,))
        return batch

    def __len__(self) -> int:
        return sum(map(len, self.by_level.values()))

    def _add(self, usages: Iterable[KvUsage]) -> None:
        by_level = self.by_level
        for level, left, reserved, _ in usages:
            by_level[level].append(reserved)
            if left is not None:
                self.shared.add(left)


@attrs.frozen(kw_only=True)
class KvLayout:
    """Properties of a model's KV that the prefix cache depends on."""

    cached: bool = True
    """Whether KV of this model can be cached. If not, every prompt is computed."""
    token_bytes: int = 0
    """Bytes of one token in a block, over all layers that can be cut at a token."""
    snapshot_bytes: int = 0
    """Maximum bytes of one snapshot. 0: the model needs no snapshots and can be continued at any
    token."""
    draft_state_bytes: int = 0
    """Maximum bytes of the recurrent states of before that a row keeps while rows of its batch
    draft, and of what is kept to compute those between."""
    head_state_bytes: int = 0
    """Maximum bytes of the hidden states that a row holds for the model's MTP head."""
    ring_slack_bytes: int = 0
    """Bytes of a row's sliding windows beyond those of a snapshot: rings hold more tokens than
    their window."""
    dequantized_token_bytes: int = 0
    """Bytes of one token's keys and values in the largest layer whose KV is quantized: attention
    reads a layer's KV dequantized."""
    capacity_step: int = CAPACITY_STEP
    """`step` of `kv_capacity` for this model's rows."""
    lead_tokens: int = 0
    """Number of tokens by which buffers grow before they are full, where those of all layers have
    the same lengths. 0: they have different ones, half a step longer on average."""
    first_bank: int | None = FIRST_BANK
    """Maximum number of tokens of rows in the bank of level 0. None: all rows share one bank. 0:
    rows share no buffers."""
    shared_tokens: int = SHARED_TOKENS
    """Maximum number of tokens of rows in a bank that rows share."""
    description: str = ""
    """One line for a person."""
    shapes: str = ""
    """Digest of the shapes and types of the arrays of which blocks and snapshots consist."""

    @property
    def needs_snapshots(self) -> bool:
        return self.snapshot_bytes > 0

    @property
    def _early_tokens(self) -> int:
        """Number of tokens by which buffers are longer than the row needs, because those of some
        layers have grown already."""
        return 0 if self.lead_tokens else self.capacity_step // 2

    @property
    def _fixed_bytes(self) -> int:
        """Bytes of a row whatever its length."""
        return self.snapshot_bytes + self.ring_slack_bytes + self.head_state_bytes

    @property
    def _row_token_bytes(self) -> int:
        """Bytes of one token in a row's buffers, and of what a pass makes of it at a time."""
        return self.token_bytes + self.dequantized_token_bytes

    def row_bytes(self, tokens: int) -> int:
        """Bytes of a row that holds `tokens` tokens. The buffers of some layers have grown already,
        since those of all layers do not grow in one step."""
        capacity = kv_capacity(tokens + self.lead_tokens, self.capacity_step) + self._early_tokens
        return self._row_token_bytes * capacity + self._fixed_bytes

    def usage(self, tokens: int, reserved: int) -> KvUsage:
        """Usage of a row that has `tokens` tokens, and may have `reserved` soon."""
        length = reserved + self.lead_tokens
        grows = kv_capacity(length, self.capacity_step) + 1 - length
        if not self.first_bank:
            return KvUsage(0, None, reserved, grows)
        level, left = bank_level(reserved, self.first_bank), lowest_level(tokens, self.first_bank)
        if left != level:
            return KvUsage(level, left, reserved)
        return KvUsage(
            level, None, reserved, min(grows, longest_of(level, self.first_bank) + 1 - reserved)
        )

    def batch_bytes(self, rows: Iterable[tuple[int, int]]) -> int:
        """Upper bound of the bytes of rows together, given for each row how many tokens it has and
        how many it may have soon. Rows that share a bank take as much as the longest row that it
        may hold, since a row that leaves it may have been so long; a row with a bank of its own
        takes its own capacity."""
        return self.bytes_of(BatchLengths(starmap(self.usage, rows)))

    def bytes_of(self, batch: BatchLengths) -> int:
        """`batch_bytes` of these rows."""
        return sum(
            self._bank_bytes(level, lengths, shared=level in batch.shared)
            for level, lengths in batch.by_level.items()
        )

    def _bank_bytes(self, level: int, lengths: Sequence[int], *, shared: bool) -> int:
        largest = self.first_bank << level if self.first_bank else 0
        if self.first_bank == 0 or (level and largest > self.shared_tokens):
            return sum(map(self.row_bytes, lengths))
        bound = largest if shared or len(lengths) > 1 else 0
        return len(lengths) * self.row_bytes(max(bound, *lengths))

    def max_tokens(self, nbytes: int) -> int | None:
        """Maximum number of tokens of a row of at most `nbytes` bytes; None: any number."""
        if nbytes < self._fixed_bytes:
            return 0
        if not self.token_bytes:
            return None
        tokens = max((nbytes - self._fixed_bytes) // self._row_token_bytes - self._early_tokens, 0)
        unit = _capacity_unit(tokens, self.capacity_step)
        return max(tokens // unit * unit - self.lead_tokens, 0)
