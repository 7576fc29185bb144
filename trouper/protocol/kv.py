"""Size of a model's KV, and whether it can be cached beyond the life of its row."""

from __future__ import annotations

import attrs

CAPACITY_STEP = 256
"""Minimum difference of two capacities of a row's buffer, in tokens."""


def kv_capacity(tokens: int, step: int = CAPACITY_STEP) -> int:
    """Capacity of the buffer of a row of `tokens` tokens: a multiple of `step`, and of an eighth to a quarter of the result, so that
    rows have few different capacities. At most a quarter more than `tokens`, or `step`."""
    unit = max(step, 1 << max((tokens - 1).bit_length() - 3, 0))
    return -(-tokens // unit) * unit


@attrs.frozen(kw_only=True)
class KvLayout:
    """Properties of a model's KV that the prefix cache depends on."""

    cached: bool = True
    """Whether KV of this model can be cached. If not, every prompt is computed."""
    token_bytes: int = 0
    """Bytes of one token in a block, over all layers that can be cut at a token."""
    snapshot_bytes: int = 0
    """Maximum bytes of one snapshot. 0: the model needs no snapshots and can be continued at any token."""
    capacity_step: int = CAPACITY_STEP
    """`step` of `kv_capacity` for this model's rows."""
    description: str = ""
    """One line for a person."""

    @property
    def needs_snapshots(self) -> bool:
        return self.snapshot_bytes > 0

    def row_bytes(self, tokens: int) -> int:
        """Bytes of a row that holds `tokens` tokens."""
        return self.token_bytes * kv_capacity(tokens, self.capacity_step) + self.snapshot_bytes

    def max_tokens(self, nbytes: int) -> int | None:
        """Maximum number of tokens of a row of at most `nbytes` bytes; None: any number."""
        if nbytes < self.snapshot_bytes:
            return 0
        if not self.token_bytes:
            return None
        tokens = (nbytes - self.snapshot_bytes) // self.token_bytes
        unit = max(self.capacity_step, 1 << max((tokens - 1).bit_length() - 3, 0))
        return tokens // unit * unit
