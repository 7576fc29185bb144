"""Rows of the batch as the engine sees them: in slots, or one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from trouper.engine.kv import attention_seam
from trouper.engine.kv.model_caches import guess_batching
from trouper.engine.kv.quantized_kv import KvFormat
from trouper.engine.kv.single_rows import SingleRows
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.passes.pass_shapes import EXACT, Shapes
from trouper.engine.passes.region import Ints
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.kv import BankStats
from trouper.protocol.plans import KvBound, RowId


class Rows(Protocol):
    """Prefilling rows, and decoding rows in one batch. All arrays stay lazy."""

    @property
    def decoding(self) -> Sequence[RowId]:
        """Decoding rows, in the order of the logits."""

    @property
    def order(self) -> Sequence[RowId]:
        pass

    @property
    def preparing(self) -> bool:
        """Whether the device prepared kernels or a graph since `begin_step`."""

    def begin_step(self) -> None:
        pass

    def make_room(self, lengths: Sequence[int]) -> None:
        """Make room at once for more rows of these lengths."""

    def give_back(self) -> None:
        """Release memory that the present rows do not need."""

    def bound(self, bound: KvBound | None) -> None:
        """Buffers that could exceed the limit have no room to spare. Comes after drops and before
        admissions."""

    def open(self, row: RowId, tokens: int = 0, adapter: int = 0) -> None:
        """Add a prefilling row without KV, which will have `tokens` tokens when decoding.
        `adapter`: index, 0 for none."""

    def prefill(self, chunks: Mapping[RowId, Sequence[int]]) -> mx.array | None:
        """Run tokens of prefilling rows without sampling. Returns a small array that is ready at
        the end."""

    def score(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        """Run tokens of a prefilling row alone; logits (tokens, vocabulary)."""

    def hidden(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        """Run tokens of a prefilling row alone without the head; hidden states (tokens, dim)."""

    def promote(self, row: RowId) -> None:
        """Let a prefilling row decode, last in the bank, or last of all without banks."""

    def move_outgrown(self) -> None:
        """Move decoding rows that outgrew buffers. Changes the order, hence before making
        inputs."""

    def decodes_from_nothing(self, row: RowId) -> bool:
        """Whether the row may join the batch at once. False without recurrent state: `first` must
        run the first token alone."""

    def first(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        """Run the prompt's last tokens alone; logits (1, vocabulary) after the last."""

    def decode(self, tokens: mx.array) -> mx.array:
        """Run (n,) tokens of the decoding rows; logits (n, vocabulary)."""

    def verify(self, tokens: mx.array, counts: Ints) -> mx.array:
        """Run (n, width) tokens of the decoding rows, of which counts[i] are row i's own; logits
        (n, width, vocabulary). Each row grows by one; `accepted` adds drafts."""

    def accepted(self, more: Ints) -> None:
        """Keep `more` (n,) tokens of each row besides the first."""

    def drop(self, rows: Sequence[RowId]) -> None:
        pass

    def clean(self) -> None:
        """Set numbers that are not finite to 0 in shared buffers."""

    def lengths(self) -> dict[RowId, int]:
        pass

    @property
    def nbytes(self) -> int:
        pass

    def bank_stats(self) -> tuple[BankStats, ...]:
        """Each bank, shortest rows first. Rows without banks count as one."""


def guess(model: nn.Module) -> Capabilities:
    """As `guess_batching`, and by building another pass whether rows may have several banks."""
    found = guess_batching(model)
    if found.allows("banks") and (reason := attention_seam.fault(model)):
        return found.without("banks", f"attention over several banks cannot be built: {reason}")
    return found


def rows_for(
    model: nn.Module,
    kv: KvFormat,
    slack: int = 0,
    shapes: Shapes = EXACT,
    capabilities: Capabilities | None = None,
    *,
    draft: nn.Module | None = None,
    head: nn.Module | None = None,
) -> tuple[Rows, Capabilities]:
    """Rows for a model, draft model and head (a `TargetHead`), with the capabilities.
    `capabilities` None: guessed."""
    found = capabilities or guess(model)
    if found.allows("batch"):
        return SlotRows(model, found, kv, slack, shapes, draft=draft, head=head), found
    return SingleRows(model), found
