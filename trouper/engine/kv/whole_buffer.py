"""A layer's whole buffer of keys or values, for kernels that know each row's slot and length."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import mlx.core as mx

from trouper.engine.passes.region import Region


@attrs.frozen(eq=False)
class WholeBuffer:
    """Keys or values of a pass: (slots, heads, tokens, dim). Not an array, like `Parts`."""

    buffer: mx.array
    region: Region
    view: Callable[[], mx.array]
    mask: Callable[[], mx.array | str]
    """Where no kernel can be used: the rows' view (n, heads, keys, dim), and attention's mask."""
    ring: int = 0
    window: int = 0
    """See `Heads`."""
    gathered: bool = False
    """Whether it is an array of the pass's rows alone, row i at index i. A gathered ring is as
    before the pass, with the pass's tokens appended."""
