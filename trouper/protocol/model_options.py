"""Options of one of several models, beside `Settings`."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class ModelOptions:
    """Options of one model."""

    pinned: bool = False
    """Whether the model is never unloaded for another."""
    ttl_s: float | None = None
    """Seconds without requests before sleep; 0: never; None: --model-ttl-s."""
    own_memory: frozenset[str] = frozenset()
    """Settings of memory that are this model's own: `cache_memory`, `kv_memory`. All models share
    the others."""


DEFAULT_OPTIONS = ModelOptions()
