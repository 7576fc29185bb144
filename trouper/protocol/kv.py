"""Size of a model's KV, and whether KV can be cached."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import NamedTuple

import attrs

from trouper.protocol.histogram import gauge

# Maximum tokens of a row in the bank of level 0; each level has twice as many.
FIRST_BANK = 512
# Maximum level of shared banks, in tokens; a longer row has a bank alone. Rows of different lengths
# need a mask, for which MLX has no fused attention on CUDA. Each bank costs operations in every
# layer, hence short rows share.
SHARED_TOKENS = 2**14
# Minimum step of a buffer's capacity in tokens, as in mlx-lm's caches.
CAPACITY_STEP = 256


def kv_capacity(tokens: int, step: int = CAPACITY_STEP) -> int:
    """Capacity of a row's buffer: a multiple of `step`, and of an eighth to a quarter of the
    result."""
    unit = _capacity_unit(tokens, step)
    return -(-tokens // unit) * unit


def _capacity_unit(tokens: int, step: int) -> int:
    return max(step, 1 << max((tokens - 1).bit_length() - 3, 0))


def bank_level(tokens: int, first_bank: int = FIRST_BANK) -> int:
    # The next level begins at 15/16 of the maximum, for rows of like length to move one after
    # another.
    return lowest_level(-(-16 * tokens // 15), first_bank)


def longest_of(level: int, first_bank: int) -> int:
    """Maximum tokens of a row that belongs to the level."""
    return 15 * (first_bank << level) // 16


def lowest_level(tokens: int, first_bank: int) -> int:
    """Lowest level that may still hold such a row, which moves some steps late."""
    return (max(tokens - 1, 0) // first_bank).bit_length()


@attrs.frozen(kw_only=True)
class BankStats:
    max_tokens: int | None = None
    """Length beyond which a row moves to another bank; None: no limit."""
    capacity_tokens: int = gauge(
        "trouper_bank_capacity_tokens", "Tokens that each of these has room for."
    )
    """The mean over the layers. 0: no buffers yet, or states without length."""
    rows: int = gauge(
        "trouper_bank_rows", "Rows in a bank, by the length in tokens beyond which they leave it."
    )
    slots: int = gauge("trouper_bank_slots", "Rows that the bank's buffers have room for.")
    bytes: int = gauge("trouper_bank_bytes", "Memory of the bank's buffers, used or not.")


class KvUsage(NamedTuple):
    """A row's share of memory, constant until the row grows by `lasts` tokens."""

    level: int
    """Level of the bank that the row may soon be in."""
    left: int | None
    """Level of the bank that may still hold the row; None: the same."""
    reserved: int
    """Tokens that the row may have soon, or an equivalent in bytes."""
    lasts: int = 0


NO_USAGE = KvUsage(0, None, 0)


class BatchLengths:
    """Lengths of rows by bank level, for `bytes_of`."""

    def __init__(self, usages: Iterable[KvUsage] = ()) -> None:
        self.by_level = defaultdict[int, list[int]](list)
        """Tokens that each row may have soon."""
        self.shared = set[int]()
        """Levels of banks that rows are about to leave."""
        self._add(usages)

    def with_row(self, usage: KvUsage) -> BatchLengths:
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
    """If not, every prompt is computed."""
    token_bytes: int = 0
    """Bytes in a block, over all layers that can be cut at a token."""
    snapshot_bytes: int = 0
    """Maximum bytes of a snapshot. 0: the model needs none and continues at any token."""
    draft_state_bytes: int = 0
    """Maximum bytes of the recurrent states, and of the calls to repeat, kept for a row while its
    batch drafts."""
    head_state_bytes: int = 0
    ring_slack_bytes: int = 0
    """Bytes of a row's rings beyond a snapshot's."""
    dequantized_token_bytes: int = 0
    """The largest quantized layer's, which attention reads dequantized."""
    capacity_step: int = CAPACITY_STEP
    lead_tokens: int = 0
    """Tokens by which buffers grow early. 0: the layers' lengths differ."""
    first_bank: int | None = FIRST_BANK
    """Maximum tokens of a row in the bank of level 0. None: one bank for all rows. 0: rows share no
    buffers."""
    shared_tokens: int = SHARED_TOKENS
    """Maximum tokens of rows that share a bank."""
    description: str = ""
    shapes: str = ""
    """Digest of the shapes and dtypes of blocks and snapshots."""

    @property
    def needs_snapshots(self) -> bool:
        return self.snapshot_bytes > 0

    @property
    def _early_tokens(self) -> int:
        # Mean tokens of room in layers that have grown already.
        return 0 if self.lead_tokens else self.capacity_step // 2

    @property
    def _fixed_bytes(self) -> int:
        return self.snapshot_bytes + self.ring_slack_bytes + self.head_state_bytes

    @property
    def _row_token_bytes(self) -> int:
        # Bytes of one token in buffers, and dequantized in a pass.
        return self.token_bytes + self.dequantized_token_bytes

    def row_bytes(self, tokens: int) -> int:
        """Bytes of a row; not all layers grow in one step."""
        capacity = kv_capacity(tokens + self.lead_tokens, self.capacity_step) + self._early_tokens
        return self._row_token_bytes * capacity + self._fixed_bytes

    def usage(self, tokens: int, reserved: int) -> KvUsage:
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
        """Upper bound for rows of (tokens, tokens soon)."""
        # Each row of a shared bank counts the longest length allowed there, since a leaving row may
        # have been so long.
        return self.bytes_of(BatchLengths(starmap(self.usage, rows)))

    def bytes_of(self, batch: BatchLengths) -> int:
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
        """Maximum tokens of a row of at most `nbytes` bytes; None: any number."""
        if nbytes < self._fixed_bytes:
            return 0
        if not self.token_bytes:
            return None
        tokens = max((nbytes - self._fixed_bytes) // self._row_token_bytes - self._early_tokens, 0)
        unit = _capacity_unit(tokens, self.capacity_step)
        return max(tokens // unit * unit - self.lead_tokens, 0)
