"""Faults of images to be planted: each turns one feature off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import attrs
import mlx.core as mx
import pytest

from trouper.engine.kv import row_images
from trouper.engine.kv.block_store import BlockStore
from trouper.engine.kv.row_images import RowImages, positions_of
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.passes.media_pass import MediaPass
from trouper.engine.passes.region import Ints
from trouper.engine.vision.qwen_tower import QwenTower
from trouper.protocol.capabilities import Feature
from trouper.protocol.media import MediaSpan
from trouper.protocol.plans import Restore, RowId

Plant = Callable[[pytest.MonkeyPatch], None]


def drop_deepstack(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MediaPass, "add_deepstack", lambda _self, hidden, _layer: hidden)


def ignore_delta(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowImages, "deltas", lambda _self, _rows, _lengths: None)


def scale_vectors(patch: pytest.MonkeyPatch) -> None:
    """As where a model multiplies its embeddings behind the place of the vectors."""
    put = MediaPass.put

    def scaled(self: MediaPass, embedded: mx.array) -> mx.array:
        return put(attrs.evolve(self, embeddings=self.embeddings * 8), embedded)

    patch.setattr(MediaPass, "put", scaled)


def shift_second_image(patch: pytest.MonkeyPatch) -> None:
    def shifted(spans: Sequence[MediaSpan], start: int, stop: int) -> Ints:
        positions = positions_of(spans, start, stop)
        if len(spans) > 1:
            first, last = max(spans[1].start, start), min(spans[1].end, stop)
            if first < last:
                positions[:, first - start : last - start] += len(spans[0].tokens)
        return positions

    patch.setattr(row_images, "positions_of", shifted)


def slice_encoder_wrongly(patch: pytest.MonkeyPatch) -> None:
    run = QwenTower.run_patches

    def moved_up(
        self: QwenTower, index: int, hidden: mx.array, heads: Any, patches: slice
    ) -> mx.array:
        late = min(patches.start, 3)
        moved = slice(patches.start - late, min(patches.stop, len(hidden)) - late)
        return run(self, index, hidden, heads, moved)

    patch.setattr(QwenTower, "run_patches", moved_up)


def swap_rows(patch: pytest.MonkeyPatch) -> None:
    """Each row gets the vectors of another, where several have images in a pass."""

    def swapped(media: MediaPass, rows: int, _width: int) -> MediaPass:
        return attrs.evolve(media, embeddings=media.embeddings[::-1]) if rows > 1 else media

    _change_passes(patch, swapped)


def misplace_in_company(patch: pytest.MonkeyPatch) -> None:
    """Vectors of all rows but the first are a column late."""

    def misplaced(media: MediaPass, _rows: int, width: int) -> MediaPass:
        late = (media.columns >= width).astype(mx.uint32)
        return attrs.evolve(media, columns=media.columns - late)

    _change_passes(patch, misplaced)


def _change_passes(
    patch: pytest.MonkeyPatch, change: Callable[[MediaPass, int, int], MediaPass]
) -> None:
    """`change`: gets a pass, the number of its rows with images, and its width."""
    of_pass = RowImages.of_pass

    def changed(
        self: RowImages, rows: Sequence[RowId], lengths: Ints, counts: Ints, width: int
    ) -> MediaPass | None:
        media = of_pass(self, rows, lengths, counts, width)
        ends = (lengths + counts).tolist()
        touched = [
            row
            for row, start, stop in zip(rows, lengths.tolist(), ends, strict=True)
            if self.touches(row, start, stop)
        ]
        return None if media is None else change(media, len(touched), width)

    patch.setattr(RowImages, "of_pass", changed)


def forget_restored_images(patch: pytest.MonkeyPatch) -> None:
    """A row that begins with cached blocks knows no image before their end."""
    opened, restore = list[RowImages](), BlockStore.restore
    open_row = RowImages.open

    def remember(self: RowImages, row: RowId, spans: tuple[MediaSpan, ...]) -> None:
        open_row(self, row, spans)
        opened.append(self)

    def forget(self: BlockStore, row: RowId, order: Restore) -> None:
        restore(self, row, order)
        spans = opened[-1]._spans if opened else {}
        if row in spans:
            spans[row] = tuple(span for span in spans[row] if span.end > order.tokens)

    patch.setattr(RowImages, "open", remember)
    patch.setattr(BlockStore, "restore", forget)


def verify_at_text_positions(patch: pytest.MonkeyPatch) -> None:
    verify = SlotRows.verify

    def wrong(self: SlotRows, tokens: mx.array, counts: Ints) -> mx.array:
        with mock.patch.object(RowImages, "deltas", return_value=None):
            return verify(self, tokens, counts)

    patch.setattr(SlotRows, "verify", wrong)


FAULTS: dict[str, tuple[Plant, Feature]] = {
    "deepstack dropped": (drop_deepstack, "images"),
    "delta ignored": (ignore_delta, "images"),
    "features not scaled": (scale_vectors, "images"),
    "position of the second image": (shift_second_image, "images"),
    "encoder sliced wrongly": (slice_encoder_wrongly, "images"),
    "images swapped between rows": (swap_rows, "images_together"),
    "company corrupts": (misplace_in_company, "images_together"),
    "restored rows forget images": (forget_restored_images, "images_restore"),
    "drafts at positions of text": (verify_at_text_positions, "images_drafts"),
}
