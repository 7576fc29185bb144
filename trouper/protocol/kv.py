"""What a model's KV weighs, and whether it can be kept beyond its row."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class KvLayout:
    """What the cache must know of a model before it stores anything."""

    cached: bool = True
    """False: rows of this model cannot be stored; every prompt is computed."""
    token_bytes: int = 0
    """Of one token in a block: all layers that can be cut at a token."""
    snapshot_bytes: int = 0
    """Of one snapshot, at most. 0: the model needs none and can be continued at any token."""
    description: str = ""
    """One line for a person."""

    @property
    def needs_snapshots(self) -> bool:
        return self.snapshot_bytes > 0
