"""What a model expects of its caches that others do not."""

from __future__ import annotations

import attrs


@attrs.frozen
class Traits:
    """`USUAL` for nearly every model; the others are recognised in `adaptations.py`."""

    mask_rank: int = 4
    """Axes of a mask that differs between rows."""
    wide_masks: bool = False
    """Windows in masks may be wider than the ring's: later tokens of a pass then see more than its first."""
    open_buffers: bool = False
    """`keys` and `values` are read, and assigned to."""
    counts_from_zero: bool = False
    """The model counts positions from one offset for all rows, and something else puts that right."""


USUAL = Traits()
