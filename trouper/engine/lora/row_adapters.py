"""The adapter of each row of a pass, and the low-rank products of its layers.

A layer adds x A B to what the base computes, where A (inputs, rank) and B (rank, outputs) are those
of the row's adapter. The matrices of all adapters are stacked; index 0 has zeros, for rows without
an adapter in a pass where others have one.

Rows of one adapter share two ordinary products. Rows of several get theirs by `mx.gather_mm`, as
the gathered products of Punica and S-LoRA do: it reads each row's matrices where they are. On a CPU
this is faster than to copy the matrices of each row and multiply a batch (by a quarter, 16 rows of
rank 8 and 16 beside the layers of SmolLM2-135M), and than to split the rows by adapter (three
times).

On CUDA the matrices of each row are copied: MLX's gathered product of more than 64 float32 vectors
by one matrix asks for more shared memory than a block may have, so that the launch fails; and rows
of recurrent models that drafted went on from wrong states with it, or with the product of one
adapter, on an H100 (MLX 0.32.4; tests/engine/test_adapters.py, qwen3_5). Which of them is wrong
there is not known.
"""

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
    """The adapters of the pass that is being built, for the layers of one model. None: no row has
    one."""

    adapters: RowAdapters | None = None
    rows: Mapping[RowId, int] = attrs.field(factory=dict)
    """Index of the adapter of each row that has one."""
    version: int = 0
    """Number of times that the model's adapters were exchanged. Compiled passes of another version
    have other matrices."""

    def is_used(self, index: int) -> bool:
        """Whether a row has this adapter."""
        return index in self.rows.values()


class RowAdapters:
    """Indices (n,) of the adapters of a pass's rows, 0 for a row without one."""

    def __init__(self, current: CurrentAdapters, rows: Indices, *, gathered: bool = False) -> None:
        """`gathered`: also rows of one adapter get theirs by index, so that passes of other
        adapters have the same graph."""
        self._current, self._rows, self._gathered = current, rows, gathered
        alike = bool((rows == rows[0]).all())
        self.single = int(rows[0]) if alike and not gathered else None
        """The adapter of all rows; None: they are looked up by index."""

    @property
    def version(self) -> int:
        """Version of the matrices."""
        return self._current.version

    @cached_property
    def indices(self) -> mx.array:
        """(n,) uint32."""
        return mx.array(self._rows.astype(np.uint32))

    def traced(self, indices: mx.array) -> RowAdapters:
        """The adapters in a pass that is traced, where `indices` is an input."""
        found = RowAdapters(self._current, self._rows, gathered=True)
        found.__dict__["indices"] = indices
        return found

    def picked(self, rows: Indices | None) -> RowAdapters | None:
        """The adapters of some rows of the pass; None: of all."""
        indices = self._rows if rows is None else self._rows[rows]
        return (
            RowAdapters(self._current, indices, gathered=self._gathered) if indices.any() else None
        )

    def product(self, x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        """What is added for x (n, ..., inputs), whose first axis may also be all tokens of all
        rows. a: (adapters, inputs, rank), b: (adapters, rank, outputs)."""
        if self.single is not None and not device.runs_cuda_kernels():
            return (x @ a[self.single]) @ b[self.single]
        indices = self.indices
        if x.shape[0] != len(self._rows):
            indices = mx.repeat(indices, x.shape[0] // len(self._rows))
        rows = x.reshape(x.shape[0], -1, x.shape[-1])
        if device.runs_cuda_kernels():
            product = rows @ a[indices] @ b[indices]
        else:
            product = mx.gather_mm(
                mx.gather_mm(rows, a, rhs_indices=indices), b, rhs_indices=indices
            )
        return product.reshape(*x.shape[:-1], b.shape[-1])


class AdapterRows:
    """Which rows have an adapter."""

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
        """The adapters of a pass over these rows; None: no row has one, and the pass is that of the
        base."""
        if not self._rows or self._rows.keys().isdisjoint(rows):
            return None
        return RowAdapters(
            self._current,
            np.array([self._rows.get(row, 0) for row in rows], np.int32),
            gathered=gathered,
        )


def current_adapters(model: nn.Module) -> CurrentAdapters:
    """What the layers of this model look at. It belongs to the model as long as the model
    exists."""
    found: CurrentAdapters | None = getattr(model, "current_adapters", None)
    if found is None:
        model.current_adapters = found = CurrentAdapters()
    return found


@contextmanager
def applied(adapters: RowAdapters | None) -> Iterator[None]:
    """Apply these adapters while a pass is built."""
    if adapters is None:
        yield
        return
    current = adapters._current
    before, current.adapters = current.adapters, adapters
    try:
        yield
    finally:
        current.adapters = before
