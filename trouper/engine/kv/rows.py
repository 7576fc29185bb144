"""Rows of the batch as the engine sees them, and the choice between its two kinds: rows in slots,
and rows that run one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from trouper.engine.kv import attention_seam
from trouper.engine.kv.model_caches import guessed
from trouper.engine.kv.pass_shapes import EXACT, Shapes
from trouper.engine.kv.quantized_kv import KvFormat
from trouper.engine.kv.region import Ints
from trouper.engine.kv.single_rows import SingleRows
from trouper.engine.kv.slot_rows import SlotRows
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.kv import BankStats
from trouper.protocol.plans import KvBound, RowId


class Rows(Protocol):
    """Rows that prefill, and rows that decode in one batch. All arrays stay lazy."""

    @property
    def decoding(self) -> Sequence[RowId]:
        """Decoding rows, in the order of the logits."""

    @property
    def order(self) -> Sequence[RowId]:
        """All rows; decoding rows come first."""

    @property
    def preparing(self) -> bool:
        """Whether the device prepared kernels or a graph for a pass since `begin_step`."""

    def begin_step(self) -> None:
        """Passes of another step follow."""

    def make_room(self, lengths: Sequence[int]) -> None:
        """Make room for more rows, which will have this many tokens, at once: buffers that grow for
        each row would be copied each time."""

    def give_back(self) -> None:
        """Release the memory that the present rows do not need."""

    def bound(self, bound: KvBound | None) -> None:
        """Heed the bound in this step: buffers that could exceed it, if they grew by as much as
        rows may need and as much to spare, have no room to spare. Comes after rows are dropped and
        before others are admitted."""

    def open(self, row: RowId, tokens: int = 0, adapter: int = 0) -> None:
        """Add a prefilling row without KV, which will have `tokens` tokens when it decodes.
        `adapter`: index of its adapter, 0 without."""

    def prefill(self, chunks: Mapping[RowId, Sequence[int]]) -> mx.array | None:
        """Run these tokens of prefilling rows without sampling. Returns a small array that is ready
        when the prefill is done."""

    def score(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        """Run these tokens of a prefilling row alone; logits (tokens, vocabulary)."""

    def hidden(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        """Run these tokens of a prefilling row alone, without the model's head; hidden states
        (tokens, dim)."""

    def promote(self, row: RowId) -> None:
        """Let a prefilling row decode. It comes last among the decoding rows of its bank; without
        banks, among all."""

    def move_outgrown(self) -> None:
        """Move decoding rows that outgrew their buffers. Changes the order of rows, so this comes
        before their inputs are made."""

    def decodes_from_nothing(self, row: RowId) -> bool:
        """Whether the row may decode in the batch at once. False for a row without recurrent state
        to join the batch with: its first token must run alone (`first`)."""

    def first(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        """Run the last tokens of a prefilling row's prompt alone; logits (1, vocabulary) after the
        last one."""

    def decode(self, tokens: mx.array) -> mx.array:
        """Run (n,) tokens, one for each decoding row; logits (n, vocabulary) for the next token."""

    def verify(self, tokens: mx.array, counts: Ints) -> mx.array:
        """Run (n, width) tokens of the decoding rows, of which counts[i] are row i's own and the
        others padding; logits (n, width, vocabulary). Each row grows by one token; `accepted` adds
        the accepted drafts."""

    def accepted(self, more: Ints) -> None:
        """Keep the KV of `more` (n,) tokens of each row besides the first."""

    def drop(self, rows: Sequence[RowId]) -> None:
        """Remove prefilling and decoding rows, and free their KV."""

    def clean(self) -> None:
        """Set to 0 what is no finite number in buffers that rows share."""

    def lengths(self) -> dict[RowId, int]:
        """Tokens in each row's KV."""

    @property
    def nbytes(self) -> int:
        """Bytes of the KV buffers of all rows, used or not."""

    def bank_stats(self) -> tuple[BankStats, ...]:
        """Measure each bank that has rows, that of the shortest rows first. Rows without banks
        count as one bank."""


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
    """Make the rows for a model, its draft model and its MTP head, and return them with the model's
    capabilities. `capabilities` None: guessed from its caches."""
    found = capabilities or guessed(model)
    if capabilities is None and found.allows("banks") and (reason := attention_seam.fault(model)):
        found = found.without("banks", f"attention over several banks cannot be built: {reason}")
    if found.allows("batch"):
        return SlotRows(model, found, kv, slack, shapes, draft=draft, head=head), found
    return SingleRows(model), found
