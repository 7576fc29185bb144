"""Rows in slots: entering, leaving, and passes. Copies: `row_copies.py`."""

# A row has one slot in every layer's buffers of the bank (`banks.py`). A pass reads contiguous
# slots of each bank, a `Region`, without gathering KV.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trouper.engine.adaptations.adaptation_registry import adapted
from trouper.engine.kv import attention_seam
from trouper.engine.kv.banks import Banks
from trouper.engine.kv.compiled_pass import CompiledPasses, Pass, PromptPass
from trouper.engine.kv.draft_rows import DraftRows
from trouper.engine.kv.head_rows import HeadRows, rows_of_head
from trouper.engine.kv.kv_layout import layout_of
from trouper.engine.kv.model_body import body_of
from trouper.engine.kv.model_caches import slot_caches, state_slots, view
from trouper.engine.kv.pass_segments import (
    Segment,
    add_tokens,
    batch,
    begin,
    caches_of,
    finish,
    lengths_of,
    regions_of,
    rows_of,
)
from trouper.engine.kv.quantized_kv import KvFormat
from trouper.engine.kv.recorded_calls import layers_with_cache, recorded_calls
from trouper.engine.kv.recurrent_state import StateRows
from trouper.engine.kv.row_copies import RowCopies
from trouper.engine.kv.row_images import RowImages
from trouper.engine.kv.slot_buffers import SlotBuffers
from trouper.engine.lora.row_adapters import AdapterRows, applied
from trouper.engine.passes.pass_shapes import EXACT, Shapes
from trouper.engine.passes.region import Ints, Region, padded
from trouper.engine.passes.seams import exchanging, seams_of
from trouper.engine.platform.eager_eval import start_eval
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.kv import BankStats
from trouper.protocol.plans import KvBound, RowId


class SlotRows:
    """Rows in slots (see `rows.Rows`). KV moves only when a row is dropped, promoted before an
    older one, or outgrows a bank."""

    def __init__(
        self,
        model: nn.Module,
        capabilities: Capabilities,
        kv: KvFormat,
        slack: int = 0,
        shapes: Shapes = EXACT,
        *,
        draft: nn.Module | None = None,
        head: Any = None,
    ) -> None:
        """`slack`: tokens of rings beyond the window. `draft` (the draft model) and `head` (a
        `TargetHead`) have full slots."""
        # If not, the model may compute with keys, so it gets arrays.
        several = capabilities.allows("banks")
        shapes = attrs.evolve(shapes, length_kernel=shapes.length_kernel and several)
        self._model, self._shapes = model, shapes
        self._may_compile = seams_of(model) is None  # What is received is no input of a trace.
        self._prefill_together = capabilities.allows("prefill_together")
        self._images_together = capabilities.allows("images_together")
        self._adapted, self._adapters = adapted(model), AdapterRows(model)
        self.images = RowImages(self._adapted.mrope, self._adapted.reach_in_full_layers)
        drafters = [drafter for drafter in (draft, head) if drafter is not None]
        layout = cache(partial(layout_of, model, kv, *drafters))
        states = state_slots(model)
        self._states = StateRows(states, shapes)
        self._compiled = CompiledPasses(counting=shapes.rounded)

        # No reference to `self`: a cycle would keep all KV until a garbage collection.
        def make_buffers() -> SlotBuffers:
            own = slot_caches(model, kv, slack, states)
            return SlotBuffers(
                own, layout, shapes, [slot_caches(drafter, kv) for drafter in drafters]
            )

        if several:
            attention_seam.install(model, *drafters)
        self._banks = Banks(make_buffers, shapes, several=several)
        self.copies = RowCopies(self._banks, self._states, layout, slack)
        self.draft = None if draft is None else DraftRows(draft, self._banks, shapes)
        self.head: HeadRows | None = None
        if head is not None:
            self.head = rows_of_head(head, self._banks, shapes, len(drafters) - 1)
        self._target = model if head is None else head.target_states

    @property
    def decoding(self) -> Sequence[RowId]:
        return self._banks.decoding

    @property
    def order(self) -> Sequence[RowId]:
        return [*self._banks.decoding, *self._banks.prefilling]

    def lengths(self) -> dict[RowId, int]:
        return {
            row: length
            for bank in self._banks
            for row, length in zip(bank.slots.order, bank.slots.lengths.tolist(), strict=True)
        }

    def length(self, row: RowId) -> int:
        return self._banks[row].slots.length(row)

    @property
    def nbytes(self) -> int:
        return self._banks.nbytes + self._states.nbytes

    def bank_stats(self) -> tuple[BankStats, ...]:
        return self._banks.stats(self._states.nbytes)

    # -- rows that enter, decode and leave -------------------------------------------------------

    def make_room(self, lengths: Sequence[int]) -> None:
        self._banks.hold(lengths)

    def give_back(self) -> None:
        self._banks.fit()

    def bound(self, bound: KvBound | None) -> None:
        self._banks.set_spares(
            spares=bound is None or self.nbytes + 2 * bound.needed_bytes <= bound.limit_bytes
        )

    def open(self, row: RowId, tokens: int = 0, adapter: int = 0) -> None:
        self._adapters.open(row, adapter)
        self._banks.open(row, tokens)
        self._states.open(row)

    def promote(self, row: RowId) -> None:
        self._banks[row].promote(row)
        self._states.promote(row)

    def move_outgrown(self) -> None:
        self._banks.move_outgrown()

    def decodes_from_nothing(self, row: RowId) -> bool:
        return self._prefill_together or bool(self.length(row))

    def clean(self) -> None:
        self._banks.clean()

    def drop(self, rows: Sequence[RowId]) -> None:
        if rows:
            self._banks.drop(rows)
            self._states.drop(rows)
            self._adapters.drop(rows)
            self.images.drop(rows)

    # -- passes ----------------------------------------------------------------------------------

    def prefill(self, chunks: Mapping[RowId, Sequence[int]]) -> mx.array | None:
        done = None
        for bank in self._banks:
            first, prefilling = bank.slots.num_decoding, bank.slots.prefilling
            counts = np.array([len(chunks.get(row, ())) for row in prefilling], np.int32)
            lengths = bank.slots.lengths[first:].tolist()
            lone = not self._images_together and self._touch_images(prefilling, lengths, counts)
            for group in self._groups(counts.tolist(), lengths, lone=lone):
                rows = prefilling[group.start : group.stop]
                counts_of_group = counts[group.start : group.stop]
                tokens = np.zeros((len(rows), int(counts_of_group.max())), np.int32)
                for index, row in enumerate(rows):
                    tokens[index, : counts_of_group[index]] = chunks.get(row, ())
                segment = Segment(bank, first + group.start, slice(0, len(rows)))
                self._forward([segment], tokens, counts_of_group)
                if self.head is not None:
                    self.head.catch_up(rows)
                done = start_eval([*bank.buffers.state(), *self._states.state()])
        return done

    def _touch_images(self, rows: Sequence[RowId], lengths: list[int], counts: Ints) -> bool:
        return any(
            self.images.touches(row, length, length + count)
            for row, length, count in zip(rows, lengths, counts.tolist(), strict=True)
        )

    def _groups(self, counts: list[int], lengths: list[int], *, lone: bool) -> list[range]:
        # Partition a bank's prefilling rows into passes. Recurrent state would absorb padding: each
        # row runs alone.
        together = self._prefill_together and not lone
        if together and not any(map(self._shapes.alone, counts, lengths)):
            return self._shapes.groups(counts)
        return [range(index, index + 1) for index, count in enumerate(counts) if count]

    def score(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        return self._forward_alone(row, tokens)[0]

    def hidden(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        return self._forward_alone(row, tokens, self._body)[0]

    @cached_property
    def _body(self) -> nn.Module | None:
        return body_of(self._model)

    def first(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        fresh = not self.length(row) and not self._states and self._shapes.length_kernel
        return self._forward_alone(row, tokens, compiled=fresh)[:, -1, :]

    def decode(self, tokens: mx.array) -> mx.array:
        segments, counts = batch(self._banks), np.ones(tokens.shape[0], np.int32)
        regions = self._regions(segments, counts, 1)
        self._states.begin(rows_of(segments), None)
        logits = self._logits(
            segments, counts, self._of_decoding(segments, regions, tokens[:, None])
        )
        add_tokens(segments, counts)
        self._states.decoded()
        return logits[:, -1, :]

    def verify(self, tokens: mx.array, counts: Ints) -> mx.array:
        segments, width = batch(self._banks), tokens.shape[1]
        tokens = padded(tokens, width if self._states else self._shapes.drafted_width(width))
        regions = self._regions(segments, counts, tokens.shape[1], singly=True)
        self._states.begin(rows_of(segments), counts)
        with recorded_calls(self._layers):
            logits = self._logits(segments, counts, self._of_decoding(segments, regions, tokens))
        self._states.verified(lengths_of(segments), counts, width, regions[-1].adapters)
        add_tokens(segments, np.ones_like(counts))
        return logits[:, :width]

    def _regions(
        self, segments: Sequence[Segment], counts: Ints, width: int, *, singly: bool = False
    ) -> list[Region]:
        # Regions of a pass, with the rows' adapters and images.
        rows, lengths = rows_of(segments), lengths_of(segments)
        deltas = self.images.deltas(rows, lengths)
        regions = regions_of(
            segments,
            lengths,
            counts,
            width,
            self._shapes,
            singly=singly,
            deltas=deltas,
            reach=self.images.reach(rows, lengths, counts, width),
        )
        regions[-1].adapters = self._adapters.of(rows, gathered=regions[0].by_length)
        regions[-1].media = self.images.of_pass(rows, lengths, counts, width)
        return regions

    def _of_decoding(
        self, segments: Sequence[Segment], regions: Sequence[Region], tokens: mx.array
    ) -> Any:
        # The pass over tokens (n, width) of all decoding rows, compiled if possible.
        one = Pass(regions, caches_of(segments))
        return self._compiled.run(
            partial(self._build, segments),
            one,
            tokens,
            may_compile=self._may_compile and not self._states,
        )

    @property
    def preparing(self) -> bool:
        return self._compiled.preparing

    def begin_step(self) -> None:
        self._compiled.begin_step()
        self.images.begin_step()

    @cached_property
    def _layers(self) -> list[nn.Module]:
        # Modules whose calls are recorded in passes with drafts.
        return layers_with_cache(self._model) if self._states else []

    def accepted(self, more: Ints) -> None:
        add_tokens(batch(self._banks), more)
        self._states.keep_tokens(1 + more)

    def _forward_alone(
        self,
        row: RowId,
        tokens: Sequence[int],
        part: nn.Module | None = None,
        *,
        compiled: bool = False,
    ) -> mx.array:
        bank, counts = self._banks[row], np.array([len(tokens)], np.int32)
        segment = Segment(bank, bank.slots.slot(row), slice(0, 1))
        return self._forward(
            [segment], np.array([tokens], np.int32), counts, part, compiled=compiled
        )

    def _forward(
        self,
        segments: Sequence[Segment],
        tokens: Ints,
        counts: Ints,
        part: nn.Module | None = None,
        *,
        compiled: bool = False,
    ) -> mx.array:
        # Build the pass over tokens (n, width), of which counts[i] are row i's own, and add these
        # to the lengths. `compiled`: the first pass over a lone prompt, compiled if possible.
        # Returns logits (n, width, vocabulary), or the output of `part` of the model.
        width = tokens.shape[1]
        if not self._states:
            rounded = self._shapes.lone_width(width) if compiled else self._shapes.width(width)
            tokens, own = np.zeros((len(tokens), rounded), np.int32), tokens
            tokens[:, :width] = own
        regions = self._regions(segments, counts, tokens.shape[1])
        one = (PromptPass if compiled else Pass)(regions, caches_of(segments))
        self._states.begin(rows_of(segments), None)
        outputs = self._compiled.run(
            partial(self._build, segments, part=part),
            one,
            mx.array(tokens),
            may_compile=self._may_compile and compiled,
        )
        logits = self._logits(segments, counts, outputs)
        add_tokens(segments, counts)
        return (logits if part is None else outputs)[:, :width]

    def _build(
        self,
        segments: Sequence[Segment],
        regions: Sequence[Region],
        tokens: mx.array,
        part: nn.Module | None = None,
    ) -> Any:
        # Build the pass over tokens (n, width) in these slots. With a head the result is for its
        # `split`.
        caches = begin(segments, regions)
        with (
            exchanging(self._model),
            self._adapted.during(regions[-1]),
            applied(regions[-1].adapters),
        ):
            outputs = (part or self._target)(tokens, cache=[view(cache) for cache in caches])
        self._states.finish()
        finish(segments)
        return outputs

    def _logits(self, segments: Sequence[Segment], counts: Ints, outputs: Any) -> mx.array:
        if self.head is not None:
            return self.head.logits_after(segments, counts, outputs)
        logits: mx.array = outputs
        return logits
