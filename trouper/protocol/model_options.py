from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class ModelOptions:
    """Options of one model."""

    pinned: bool = False
    """Never unloaded for another model."""
    ttl_s: float | None = None
    """Seconds without requests before sleep; 0: never; None: --model-ttl-s."""
    own_memory: frozenset[str] = frozenset()
    """Own settings among `cache_memory`, `kv_memory`; others are shared."""


DEFAULT_OPTIONS = ModelOptions()
