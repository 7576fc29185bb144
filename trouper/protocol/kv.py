"""Size of a model's KV, and whether it can be cached beyond the life of its row."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class KvLayout:
    """Properties of a model's KV that the prefix cache depends on."""

    cached: bool = True
    """Whether KV of this model can be cached. If not, every prompt is computed."""
    token_bytes: int = 0
    """Bytes of one token in a block, over all layers that can be cut at a token."""
    snapshot_bytes: int = 0
    """Maximum bytes of one snapshot. 0: the model needs no snapshots and can be continued at any token."""
    description: str = ""
    """One line for a person."""

    @property
    def needs_snapshots(self) -> bool:
        return self.snapshot_bytes > 0
