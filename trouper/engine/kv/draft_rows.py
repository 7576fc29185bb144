"""The draft model's passes over rows in slots."""

# The draft model's caches are further layers of the same slots (`SlotBuffers`), hence are moved,
# dropped, stored and restored with the target's. Only computed lengths are separate and lag behind:
# a row that does not draft runs no pass here. Wrong KV costs acceptance, never a token.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trouper.engine.adaptations.adaptation_registry import adapted
from trouper.engine.kv.banks import Bank, Banks
from trouper.engine.kv.model_caches import view
from trouper.engine.kv.pass_segments import Segment, begin, finish, regions_of, rows_of
from trouper.engine.passes.pass_shapes import Shapes
from trouper.engine.passes.region import Ints, padded
from trouper.engine.platform.eager_eval import start_eval
from trouper.protocol.plans import RowId

# Maximum tokens of a row in one catching-up pass: scores of more take unplanned memory.
CHUNK = 512


class DraftRows:
    """Rows of the draft model, in the target's slots."""

    def __init__(
        self, model: nn.Module, banks: Banks, shapes: Shapes, cache_index: int = 0
    ) -> None:
        self._model = model
        self._banks = banks
        self._shapes = shapes
        self._cache_index = cache_index
        self._adapted = adapted(model)
        self.lengths: dict[RowId, int] = {}
        """Tokens of each row with correct KV; later ones are overwritten."""

    def prefill(self, missing: Mapping[RowId, Sequence[int]]) -> None:
        """Run the next tokens of each row, prefilling or decoding, in one pass unless padding is
        too much."""
        remaining = {row: tokens for row, tokens in missing.items() if len(tokens)}
        while remaining:
            chunks = {row: tokens[:CHUNK] for row, tokens in remaining.items()}
            for bank in self._banks:
                self._prefill(bank, chunks)
            remaining = {
                row: tokens[CHUNK:] for row, tokens in remaining.items() if len(tokens) > CHUNK
            }

    def _prefill(self, bank: Bank, chunks: Mapping[RowId, Sequence[int]]) -> None:
        order = bank.slots.order
        counts = [len(chunks.get(row, ())) for row in order]
        lengths = [self.lengths[row] for row in order]
        groups = self._shapes.groups(counts)
        if any(map(self._shapes.alone, counts, lengths)):
            groups = [range(slot, slot + 1) for slot, count in enumerate(counts) if count]
        for group in groups:
            segment = Segment(bank, group.start, slice(0, len(group)))
            self._run([segment], {row: chunks[row] for row in segment.rows if row in chunks})
            start_eval(bank.buffers.state())

    def propose(
        self,
        fed: Mapping[RowId, Sequence[int]],
        sizes: Mapping[RowId, int],
        agree: Callable[[mx.array], mx.array],
    ) -> dict[RowId, list[int]]:
        """Draft sizes[row] tokens for each decoding row, greedily, in a pass for each token. The
        first pass runs the lacking tokens `fed`: one or two. `agree` returns rank 0's tokens."""
        segments = self._segments(sizes)
        last, order = self._run(segments, fed), rows_of(segments)
        picked = self._pick(last)
        drafted, orders = [picked], [order]
        for step in range(1, max(sizes.values())):
            active = [row for row, size in sizes.items() if size > step]
            segments = self._segments(active)
            if (rows := rows_of(segments)) != order:
                indices = mx.array([order.index(row) for row in rows])
                picked, last, order = picked[indices], last[indices], rows
            counts = self._counts(rows, dict.fromkeys(active, 1))
            last = self._forward(segments, picked[:, None], counts, self._after(last))[:, -1]
            picked = self._pick(last)
            drafted.append(picked)
            orders.append(order)
        tokens = np.array(agree(mx.concatenate(drafted))).tolist()
        drafts: dict[RowId, list[int]] = {row: [] for row in sizes}
        for row, token in zip([row for order in orders for row in order], tokens, strict=True):
            if row in drafts and len(drafts[row]) < sizes[row]:
                drafts[row].append(token)
        return drafts

    def _segments(self, active: Sequence[RowId] | Mapping[RowId, int]) -> list[Segment]:
        # The slots of each bank from the first to the last active row. Other rows between get
        # padding.
        segments, end = list[Segment](), 0
        for bank in self._banks:
            slots = [slot for slot, row in enumerate(bank.slots.decoding) if row in active]
            if slots:
                rows = slots[-1] + 1 - slots[0]
                segments.append(Segment(bank, slots[0], slice(end, end + rows)))
                end += rows
        return segments

    @staticmethod
    def _counts(rows: Sequence[RowId], counts: Mapping[RowId, int]) -> Ints:
        return np.array([counts.get(row, 0) for row in rows], np.int32)

    def _run(self, segments: Sequence[Segment], fed: Mapping[RowId, Sequence[int]]) -> mx.array:
        # Run tokens from the host; logits (n, vocabulary) after each row's last, or the model's
        # counterpart.
        rows = rows_of(segments)
        counts = self._counts(rows, {row: len(tokens) for row, tokens in fed.items()})
        tokens = np.zeros((len(rows), int(counts.max())), np.int32)
        for index, row in enumerate(rows):
            tokens[index, : counts[index]] = fed.get(row, ())
        outputs = self._forward(segments, mx.array(tokens), counts, self._before(rows, counts))
        last = np.arange(len(rows)) * outputs.shape[1] + np.maximum(counts, 1) - 1
        return mx.flatten(outputs, 0, 1)[mx.array(last.astype(np.int32))]

    # A draft model gets tokens alone, and returns logits. An MTP head gets hidden states as well
    # (`HeadRows`).

    def _before(self, rows: Sequence[RowId], counts: Ints) -> mx.array | None:  # noqa: ARG002
        # Further input (n, width, any dim) for the next counts[i] tokens of each row.
        return None

    def _after(self, last: mx.array) -> mx.array | None:  # noqa: ARG002
        # Further input (n, 1, any dim) for drafted tokens, from the output before.
        return None

    def _pick(self, last: mx.array) -> mx.array:
        # The most likely tokens (n,) by the model's output (n, any dim).
        return mx.argmax(last, axis=-1)

    def _forward(
        self, segments: Sequence[Segment], tokens: mx.array, counts: Ints, before: mx.array | None
    ) -> mx.array:
        # Build the pass over tokens (n, width), of which counts[i] are row i's own, and add these
        # to the lengths. Returns logits (n, at least width, vocabulary).
        rows, width = rows_of(segments), self._shapes.width(tokens.shape[1])
        inputs = [padded(part, width) for part in (tokens, before) if part is not None]
        lengths = np.array([self.lengths[row] for row in rows], np.int32)
        regions = regions_of(segments, lengths, counts, width, self._shapes)
        caches = begin(segments, regions, lambda buffers: buffers.draft_caches[self._cache_index])
        with self._adapted.during(regions[-1]):
            outputs: mx.array = self._model(*inputs, cache=[view(cache) for cache in caches])
        finish(segments)
        for row, count in zip(rows, counts.tolist(), strict=True):
            self.lengths[row] += count
        return outputs
