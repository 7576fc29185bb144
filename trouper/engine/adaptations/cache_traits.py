"""Traits of a model's caches that differ between models."""

from __future__ import annotations

import attrs


@attrs.frozen
class Traits:
    """Traits of a model's caches. Nearly every model has `USUAL`; `adaptation_registry.py`
    recognises the others."""

    mask_rank: int = 4
    """Number of axes of a mask that differs between rows."""
    wide_masks: bool = False
    """Windows in masks may be wider than the ring's: later tokens of a pass then see more than its
    first."""
    open_buffers: bool = False
    """The model reads and assigns the caches' `keys` and `values`."""
    counts_from_zero: bool = False
    """The model counts positions from one offset for all rows; caches give 0, and an adaptation
    corrects the positions."""


USUAL = Traits()
