from __future__ import annotations

import attrs


@attrs.frozen
class Traits:
    """Traits of a model's caches, mostly `USUAL` (see `adaptation_registry.py`)."""

    mask_rank: int = 4
    """Axes of a mask that differs between rows."""
    wide_masks: bool = False
    """Masks' windows may be wider than the ring."""
    open_buffers: bool = False
    """The model assigns caches' `keys` and `values`."""
    counts_from_zero: bool = False
    """Caches give offset 0; an adaptation corrects positions."""


USUAL = Traits()
