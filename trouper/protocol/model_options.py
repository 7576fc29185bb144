"""What the model manager does with one of several models, beside its `Settings`."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class ModelOptions:
    """Options of one model."""

    pinned: bool = False
    """Whether the model is never unloaded for another one."""
    ttl_s: float | None = None
    """Time without requests, in seconds, after which the model goes to sleep; 0: never; None:
    --model-ttl-s."""
    own_memory: frozenset[str] = frozenset()
    """Names of the settings of memory that hold for it alone: `cache_memory`, `kv_memory`. All
    models share the others."""


DEFAULT_OPTIONS = ModelOptions()
