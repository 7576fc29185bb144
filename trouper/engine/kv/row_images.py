"""Images of rows: positions of their tokens, and what a pass gets of them.

Everything follows from the row's spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import mlx.core as mx
import numpy as np

from trouper.engine.passes.media_pass import EncodedImage, MediaPass
from trouper.engine.passes.region import Ints, Reach
from trouper.protocol.media import MediaSpan, count_positions
from trouper.protocol.plans import RowId

AXES = 3


@attrs.define(eq=False)
class RowImages:
    """The images of present rows. `mrope`: positions have three axes. `reach_in_full_layers`:
    tokens of atomic spans attend to later ones also in layers without a window."""

    mrope: bool
    reach_in_full_layers: bool = True
    _spans: dict[RowId, tuple[MediaSpan, ...]] = attrs.field(factory=dict)
    _shown: dict[RowId, dict[int, EncodedImage]] = attrs.field(factory=dict)
    """By start of the span; of this step's chunks."""

    def open(self, row: RowId, spans: tuple[MediaSpan, ...]) -> None:
        if spans:
            self._spans[row] = spans

    def drop(self, rows: Sequence[RowId]) -> None:
        for row in rows:
            self._spans.pop(row, None)

    def begin_step(self) -> None:
        """Release the vectors of the last step."""
        self._shown.clear()

    def show(self, row: RowId, start: int, stop: int, images: Sequence[EncodedImage]) -> None:
        """Give the vectors of the spans that the row's tokens from `start` to `stop` touch, in
        order."""
        touched = [span.start for span in self._touched(row, start, stop)]
        self._shown[row] = dict(zip(touched, images, strict=True))

    def touches(self, row: RowId, start: int, stop: int) -> bool:
        return any(True for _ in self._touched(row, start, stop))

    def deltas(self, rows: Sequence[RowId], lengths: Ints) -> Ints | None:
        """(n,): positions of each row's next token beyond its tokens in KV; None: all 0."""
        if not self.mrope or not self._spans or self._spans.keys().isdisjoint(rows):
            return None
        return np.array(
            [
                count_positions(self._spans.get(row, ()), length) - length
                for row, length in zip(rows, lengths.tolist(), strict=True)
            ],
            np.int32,
        )

    def of_pass(
        self, rows: Sequence[RowId], lengths: Ints, counts: Ints, width: int
    ) -> MediaPass | None:
        """Images among the next counts[i] tokens of each row; None if there are none."""
        if not self._spans or self._spans.keys().isdisjoint(rows):
            return None
        ends = lengths + counts
        spans = zip(rows, lengths.tolist(), ends.tolist(), strict=True)
        if not any(self.touches(row, start, stop) for row, start, stop in spans):
            return None
        columns, vectors = list[Ints](), list[EncodedImage]()
        for index, row in enumerate(rows):
            start, stop = int(lengths[index]), int(ends[index])
            for own, part in self._embedded(row, start, stop):
                columns.append(index * width + own)
                vectors.append(part)
        if not columns:
            return None  # Separators alone, which are ordinary tokens.
        deepstack = zip(*(part.deepstack for part in vectors), strict=True)
        return MediaPass(
            mx.array(np.concatenate(columns).astype(np.uint32)),
            mx.concatenate([part.embeddings for part in vectors]),
            tuple(mx.concatenate(list(terms)) for terms in deepstack),
            self._positions(rows, lengths, width) if self.mrope else None,
        )

    def reach(self, rows: Sequence[RowId], lengths: Ints, counts: Ints, width: int) -> Reach | None:
        """Reach of the next counts[i] tokens of each row; None if none attends to a later one."""
        if not self._spans or self._spans.keys().isdisjoint(rows):
            return None
        last = (lengths[:, None] + np.arange(width)).astype(np.int32)
        causal = last.copy()
        for own, row, start, stop in zip(
            last, rows, lengths.tolist(), (lengths + counts).tolist(), strict=True
        ):
            for first, end in self._atomic_runs(row, start, stop):
                own[max(first, start) - start : end - start] = end - 1
        return None if (last == causal).all() else Reach(last, self.reach_in_full_layers)

    def _atomic_runs(self, row: RowId, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield beginnings and ends of runs whose tokens attend to each other. Raises
        `AssertionError` for a chunk that ends inside."""
        for span in self._touched(row, start, stop):
            for offset, length in span.embedded if span.atomic else ():
                first, end = span.start + offset, span.start + offset + length
                if first < stop and start < end:
                    assert end <= stop, "a chunk ends inside an image that attends to its end"
                    yield first, end

    def _touched(self, row: RowId, start: int, stop: int) -> Iterator[MediaSpan]:
        for span in self._spans.get(row, ()):
            if span.start < stop and start < span.end:
                yield span

    def _embedded(self, row: RowId, start: int, stop: int) -> Iterator[tuple[Ints, EncodedImage]]:
        """Yield columns of a row's tokens from `start` to `stop`, with their vectors."""
        for span in self._touched(row, start, stop):
            image, before = self._shown[row][span.start], 0
            for offset, length in span.embedded:
                first = span.start + offset
                begin, end = max(first, start), min(first + length, stop)
                if begin < end:
                    taken = slice(before + begin - first, before + end - first)
                    part = EncodedImage(
                        image.embeddings[taken], tuple(each[taken] for each in image.deepstack)
                    )
                    yield np.arange(begin - start, end - start, dtype=np.int32), part
                before += length

    def _positions(self, rows: Sequence[RowId], lengths: Ints, width: int) -> mx.array:
        positions = [
            positions_of(self._spans.get(row, ()), start, start + width)
            for row, start in zip(rows, lengths.tolist(), strict=True)
        ]
        return mx.array(np.stack(positions, axis=1))


def positions_of(spans: Sequence[MediaSpan], start: int, stop: int) -> Ints:
    """(3, stop - start) int32: frame, row and column of a prompt's tokens, as `get_rope_index` of
    transformers' Qwen3-VL gives them."""
    positions = np.tile(np.arange(start, stop, dtype=np.int32), (AXES, 1))
    delta = 0
    for span in spans:
        if span.start >= stop:
            break
        begin, end = max(span.start, start), min(span.end, stop)
        if begin < end:
            inside = _positions_inside(span)[:, begin - span.start : end - span.start]
            positions[:, begin - start : end - start] = span.start + delta + inside
        behind = max(span.end, start) - start
        delta += span.extent - len(span.tokens)
        positions[:, behind:] = np.arange(start + behind, stop, dtype=np.int32) + delta
    return positions


def _positions_inside(span: MediaSpan) -> Ints:
    """(3, tokens) int32, from 0. With M-RoPE a span is a grid, without delimiters."""
    grid = np.indices(span.shape.grid, dtype=np.int32).reshape(AXES, -1)
    assert grid.shape[1] == len(span.tokens), "a span has a token for each place of its grid"
    return grid
