"""The adapter of each row of a pass, and the low-rank products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from trouper.engine.platform import device
from trouper.protocol.plans import RowId

Indices = NDArray[np.int32]


@attrs.define(eq=False)
class CurrentAdapters:
    """The adapters of the pass under construction. None: no row has one."""

    adapters: RowAdapters | None = None
    rows: Mapping[RowId, int] = attrs.field(factory=dict)
    version: int = 0
    """Number of exchanges; compiled passes of another version have other matrices."""

    def is_used(self, index: int) -> bool:
        return index in self.rows.values()


# A layer adds x A B, with A (inputs, rank) and B (rank, outputs) of the row's adapter; index 0 has
# zeros. Rows of one adapter share two products. Mixed rows have `mx.gather_mm`, like Punica and
# S-LoRA, which reads matrices in place.
class RowAdapters:
    """Adapter indices (n,) of a pass's rows; 0: none."""

    def __init__(self, current: CurrentAdapters, rows: Indices, *, gathered: bool = False) -> None:
        """`gathered`: index rows of one adapter, too, for one graph for all adapters."""
        self._current, self._rows, self._gathered = current, rows, gathered
        alike = bool((rows == rows[0]).all())
        self.single = int(rows[0]) if alike and not gathered else None
        """The adapter of all rows; None: by index."""

    @property
    def version(self) -> int:
        return self._current.version

    @cached_property
    def indices(self) -> mx.array:
        return mx.array(self._rows.astype(np.uint32))

    def traced(self, indices: mx.array) -> RowAdapters:
        """`indices`: an input of the traced pass."""
        found = RowAdapters(self._current, self._rows, gathered=True)
        found.__dict__["indices"] = indices
        return found

    def picked(self, rows: Indices | None) -> RowAdapters | None:
        """None: all rows."""
        indices = self._rows if rows is None else self._rows[rows]
        return (
            RowAdapters(self._current, indices, gathered=self._gathered) if indices.any() else None
        )

    def product(self, x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        """Return x A B for x (n, ..., inputs); the first axis may be all tokens of all rows. a:
        (adapters, inputs, rank), b: (adapters, rank, outputs)."""
        if self.single is not None and not device.runs_cuda_kernels():
            return (x @ a[self.single]) @ b[self.single]
        indices = self.indices
        if x.shape[0] != len(self._rows):
            indices = mx.repeat(indices, x.shape[0] // len(self._rows))
        rows = x.reshape(x.shape[0], -1, x.shape[-1])
        if device.runs_cuda_kernels():
            # Copies each row's matrices: MLX's gathered product of more than 64 float32 vectors
            # exceeds a block's shared memory, and with it drafting rows of recurrent models went on
            # from wrong states, cause unknown (H100, MLX 0.32.4; tests/engine/test_adapters.py,
            # qwen3_5).
            product = rows @ a[indices] @ b[indices]
        else:
            product = mx.gather_mm(
                mx.gather_mm(rows, a, rhs_indices=indices), b, rhs_indices=indices
            )
        return product.reshape(*x.shape[:-1], b.shape[-1])


class AdapterRows:
    def __init__(self, model: nn.Module) -> None:
        self._current = current_adapters(model)
        self._rows: dict[RowId, int] = {}
        self._current.rows = self._rows

    def open(self, row: RowId, adapter: int) -> None:
        if adapter:
            self._rows[row] = adapter

    def drop(self, rows: Sequence[RowId]) -> None:
        for row in rows if self._rows else ():
            self._rows.pop(row, None)

    def of(self, rows: Sequence[RowId], *, gathered: bool = False) -> RowAdapters | None:
        """None: no row has an adapter, and the pass is the base's."""
        if not self._rows or self._rows.keys().isdisjoint(rows):
            return None
        return RowAdapters(
            self._current,
            np.array([self._rows.get(row, 0) for row in rows], np.int32),
            gathered=gathered,
        )


def current_adapters(model: nn.Module) -> CurrentAdapters:
    """The adapters that the model's layers read, for the model's lifetime."""
    found: CurrentAdapters | None = getattr(model, "current_adapters", None)
    if found is None:
        model.current_adapters = found = CurrentAdapters()
    return found


@contextmanager
def applied(adapters: RowAdapters | None) -> Iterator[None]:
    """Apply adapters while a pass is built."""
    if adapters is None:
        yield
        return
    current = adapters._current
    before, current.adapters = current.adapters, adapters
    try:
        yield
    finally:
        current.adapters = before
