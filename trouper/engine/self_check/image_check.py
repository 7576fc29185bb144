"""Checks rows with images on the real model: against the model's own code, one text at a time.

Embeddings of random tokens stand for an encoder's vectors. In the reference, columns and positions
are counted token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import attrs
import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from trouper.engine.adaptations.adaptation_registry import adapted
from trouper.engine.adaptations.image_passes import embedding_of, padding_of
from trouper.engine.kv.block_store import BlockStore
from trouper.engine.kv.quantized_kv import KvFormat
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.passes.media_pass import EncodedImage, MediaPass
from trouper.engine.passes.pass_shapes import of_device
from trouper.engine.passes.region import Region
from trouper.engine.platform.error_text import line_of
from trouper.engine.self_check.accuracy import (
    Arithmetic,
    arithmetic_of,
    described,
    errors,
    random_texts,
)
from trouper.engine.self_check.scenarios import SLACK, ForcedRows
from trouper.protocol.capabilities import Capabilities, Feature
from trouper.protocol.media import ImageLayout, ImageShape, MediaSpan, chunk_end
from trouper.protocol.plans import BlockId, Restore, RowId, Store

SEED = 3
TEXT, TWO, ONE = range(3)
"""Indices of the texts: without images, with two, with one."""
LENGTHS = (17, 5, 4, 9, 3, 12)
"""Of the text, and of what stands around the images of the two others."""
GRIDS = ((1, 3, 2), (1, 2, 3), (1, 2, 2))
STAND_INS = (2, 3, 9)
"""Indices in the text of tokens that become images."""


@attrs.frozen
class Illustrated:
    """Tokens, spans of images, and the vectors of each."""

    tokens: list[int]
    spans: tuple[MediaSpan, ...] = ()
    images: tuple[EncodedImage, ...] = ()


@attrs.frozen(eq=False)
class ImageCheck:
    """`deepstack`: number of layers that get vectors. `agree`: combines the reasons of all
    ranks."""

    model: nn.Module
    layout: ImageLayout
    deepstack: int
    vocabulary: int
    kv: KvFormat
    capabilities: Capabilities
    agree: Callable[[str], str] = lambda reason: reason

    def off(self) -> dict[Feature, str]:
        """Return the reason of each feature that is wrong. Without "images" none is tried."""
        reasons: dict[Feature, str] = {}
        for feature, needed, scenario in SCENARIOS:
            wrong = "images" in reasons or feature in reasons
            if not wrong and self.capabilities.allows(needed):
                reason = self.agree(self._fault(scenario))
                reasons.update({feature: reason} if reason else {})
        return reasons

    def _fault(self, scenario: Callable[[ImageCheck], str]) -> str:
        try:
            return scenario(self)
        except Exception as error:  # noqa: BLE001
            # Any architecture's code: whatever it raises is the finding.
            return f"a pass with an image fails: {line_of(error)}"

    # -- scenarios -------------------------------------------------------------------------------

    def stand_ins(self) -> str:
        """Images of one token, whose vectors are a token's, are that token."""
        text = list(self.texts[TEXT].tokens)
        padding = padding_of(self.model)
        if padding is not None:
            for index in STAND_INS:
                text[index] = padding
        spans = tuple(self._stand_in(index, text[index]) for index in STAND_INS)
        vectors = embedding_of(self.model)(mx.array(text))
        zeros = (mx.zeros_like(vectors[:1]),) * self.deepstack
        images = tuple(EncodedImage(vectors[index : index + 1], zeros) for index in STAND_INS)
        logits = self._in_slots(Illustrated(text, spans, images), (4, len(text) - 4))
        return self._judged(logits, self._reference(Illustrated(text)), [TEXT] * len(text))

    def vectors_matter(self) -> str:
        """The vectors of images, and those of each deepstack layer, change the logits."""
        for term in range(1 + self.deepstack):
            other = self._reference(_without(self.texts[TWO], term))
            if bool(mx.array_equal(other, self.references[TWO]).item()):
                part = f"vectors of deepstack layer {term - 1}" if term else "vectors"
                return f"the {part} of images change nothing"
        return ""

    def alone_and_with_text(self) -> str:
        """A row prefills in chunks that are cut inside both images, beside a row that decodes, and
        decodes with it."""
        rows = self._rows()
        [text] = rows.open(TEXT)
        rows.step({text: 3})
        rows.step(joining=[text])
        [row] = self._open(rows, TWO)
        self._prefill(rows, row, TWO, (1, self._inside(TWO, 0), self._inside(TWO, 1)))
        rows.step(joining=[row])
        rows.step()
        rows.step()
        return self._judged_rows(rows)

    def prefill_together(self) -> str:
        """Images of two rows and text in padded passes."""
        rows = self._rows()
        two, text, one = self._open(rows, TWO, TEXT, ONE)
        shown = {two: TWO, text: TEXT, one: ONE}
        self._chunks(rows, {two: self._inside(TWO, 0), text: 4, one: self._inside(ONE, 0)}, shown)
        behind = {row: self._end(text, -1) + 1 for row, text in ((two, TWO), (one, ONE))}
        rest = {row: stop - sum(rows.chunk_sizes(row)) for row, stop in behind.items()}
        self._chunks(rows, rest | {text: 2}, shown)
        rows.step(joining=[two, text, one])
        rows.step()
        return self._judged_rows(rows)

    def restored(self) -> str:
        """Rows begin with another's blocks, which end inside each image and behind both."""
        ends = self._inside(TWO, 0), self._inside(TWO, 1), self._end(TWO, 1) + 1
        faults = map(self._restored_at, ends)
        return next(filter(None, faults), "")

    def _restored_at(self, tokens: int) -> str:
        rows = self._rows()
        assert isinstance(rows.rows, SlotRows)
        blocks = BlockStore(rows.rows.copies)
        snapshot = BlockId(1) if rows.rows.copies.layout.snapshot_bytes else None
        [first] = self._open(rows, TWO)
        self._chunks(rows, {first: tokens}, {first: TWO})
        blocks.store(Store(first, 0, (tokens,), (BlockId(0),), snapshot))
        computed = rows.chunk_sizes(first)
        rows.leave(first)
        second = rows.open_restored(TWO, computed, tokens)
        rows.rows.images.open(second, self.texts[TWO].spans)
        blocks.restore(second, Restore(tokens, (BlockId(0),), snapshot=snapshot))
        self._prefill(rows, second, TWO, (tokens + 1, self._end(TWO, 1) + 2))
        rows.step(joining=[second])
        rows.step()
        return self._judged_rows(rows)

    def drafts(self) -> str:
        """Drafts behind images, wrong and right ones."""
        rows = self._rows()
        two, one = self._open(rows, TWO, ONE)
        for row, text in ((two, TWO), (one, ONE)):
            self._prefill(rows, row, text)
        rows.step(joining=[two, one])
        rows.step(drafts={two: (0, 2), one: (1, 1)})
        rows.step(drafts={two: (1, 1), one: (0, 1)})
        rows.step()
        return self._judged_rows(rows)

    # -- rows ------------------------------------------------------------------------------------

    def _rows(self) -> ForcedRows:
        return ForcedRows(self._slots(), [shown.tokens for shown in self.texts])

    def _slots(self) -> SlotRows:
        return SlotRows(self.model, self.capabilities, self.kv, SLACK, of_device())

    def _open(self, rows: ForcedRows, *texts: int) -> list[RowId]:
        assert isinstance(rows.rows, SlotRows)
        opened = rows.open(*texts)
        for row, text in zip(opened, texts, strict=True):
            rows.rows.images.open(row, self.texts[text].spans)
        return opened

    def _prefill(self, rows: ForcedRows, row: RowId, text: int, cuts: Sequence[int] = ()) -> None:
        """In chunks that end at `cuts`, and behind the last image."""
        for stop in (*cuts, max((self._end(text, -1) + 1, *cuts))):
            count = stop - sum(rows.chunk_sizes(row))
            if count > 0:
                self._chunks(rows, {row: count}, {row: text})

    def _chunks(
        self, rows: ForcedRows, chunks: Mapping[RowId, int], shown: Mapping[RowId, int]
    ) -> None:
        assert isinstance(rows.rows, SlotRows)
        for row, count in chunks.items():
            start = sum(rows.chunk_sizes(row))
            self._show(rows.rows, row, self.texts[shown[row]], (start, start + count))
        rows.step(chunks)

    @staticmethod
    def _show(slots: SlotRows, row: RowId, shown: Illustrated, chunk: tuple[int, int]) -> None:
        pairs = zip(shown.spans, shown.images, strict=True)
        start, stop = chunk
        touched = [image for span, image in pairs if span.start < stop and start < span.end]
        slots.images.show(row, start, stop, touched)

    def _in_slots(self, shown: Illustrated, chunks: Sequence[int]) -> mx.array:
        """Logits (tokens, vocabulary) of one row."""
        slots, row, start = self._slots(), RowId(0), 0
        slots.open(row, len(shown.tokens))
        slots.images.open(row, shown.spans)
        logits = []
        for count in chunks:
            self._show(slots, row, shown, (start, start + count))
            logits.append(slots.score(row, shown.tokens[start : start + count]))
            start += count
        return mx.concatenate(logits)

    # -- texts -----------------------------------------------------------------------------------

    @cached_property
    def texts(self) -> list[Illustrated]:
        text, *around = random_texts(LENGTHS, self.vocabulary, SEED)
        first, between, last, before, behind = around
        images = tuple(map(self._image, GRIDS, range(len(GRIDS))))
        two = self._illustrated((first, between, last), images[:2])
        return [Illustrated(text), two, self._illustrated((before, behind), images[2:])]

    def _illustrated(
        self,
        around: Sequence[Sequence[int]],
        images: Sequence[tuple[ImageShape, EncodedImage]],
    ) -> Illustrated:
        tokens, spans = list(around[0]), list[MediaSpan]()
        for (shape, _), behind in zip(images, around[1:], strict=True):
            span = self.layout.span(len(tokens), shape, bytes(32))
            spans.append(span)
            tokens += [*span.tokens, *behind]
        return Illustrated(tokens, tuple(spans), tuple(image for _, image in images))

    def _image(self, grid: tuple[int, int, int], number: int) -> tuple[ImageShape, EncodedImage]:
        shape = ImageShape((1, 1), grid)
        count = self.layout.span(0, shape, bytes(32)).num_embedded * (1 + self.deepstack)
        random = np.random.RandomState(SEED + number)
        drawn = mx.array(random.randint(1, max(self.vocabulary // 2, 2), count))
        embeddings, *deepstack = mx.split(embedding_of(self.model)(drawn), 1 + self.deepstack)
        return shape, EncodedImage(embeddings, tuple(deepstack))

    @staticmethod
    def _stand_in(index: int, token: int) -> MediaSpan:
        shape = ImageShape((1, 1), (1, 1, 1))
        return MediaSpan(index, (token,), ((0, 1),), bytes(32), shape, extent=1)

    def _inside(self, text: int, image: int) -> int:
        """A cut inside an image, or before one that cannot be cut."""
        spans = self.texts[text].spans
        return chunk_end(spans, 0, spans[image].start + 2)

    def _end(self, text: int, image: int) -> int:
        return self.texts[text].spans[image].end

    # -- the reference ---------------------------------------------------------------------------

    @cached_property
    def references(self) -> list[mx.array]:
        """Logits (tokens, vocabulary) of each text."""
        return [self._reference(shown) for shown in self.texts]

    def _reference(self, shown: Illustrated) -> mx.array:
        # The model's own caches are not quantized, and mlx-lm's masks know no images.
        if self.kv.bits or any(span.atomic for span in shown.spans):
            return self._in_slots(shown, (len(shown.tokens),))
        count, cache = len(shown.tokens), make_prompt_cache(self.model)
        region = Region(0, np.zeros(1, np.int32), np.array([count], np.int32), count)
        region.media = self._media(shown)
        with adapted(self.model).during(region):
            logits: mx.array = self.model(mx.array([shown.tokens]), cache=cache)
        return logits[0]

    def _media(self, shown: Illustrated) -> MediaPass | None:
        if not shown.spans:
            return None
        columns, positions = _walk(len(shown.tokens), shown.spans)
        deepstack = zip(*(image.deepstack for image in shown.images), strict=True)
        return MediaPass(
            mx.array(columns, mx.uint32),
            mx.concatenate([image.embeddings for image in shown.images]),
            tuple(mx.concatenate(list(terms)) for terms in deepstack),
            mx.array(positions).T[:, None] if adapted(self.model).mrope else None,
        )

    # -- judgement -------------------------------------------------------------------------------

    @cached_property
    def _arithmetic(self) -> tuple[Arithmetic, float]:
        """The arithmetic, and the bound by the model's error against itself."""
        arithmetic, text = arithmetic_of(self.model, self.kv), self.texts[TEXT]
        in_chunks = self._in_slots(text, (3, len(text.tokens) - 3))
        noise = errors(in_chunks, self.references[TEXT])
        return arithmetic, arithmetic.bound(arithmetic.judged(noise, [TEXT] * len(text.tokens)))

    def _judged_rows(self, rows: ForcedRows) -> str:
        expected = [self.references[taken.text][taken.position] for taken in rows.taken]
        logits = mx.stack([taken.logits for taken in rows.taken])
        return self._judged(logits, mx.stack(expected), [taken.text for taken in rows.taken])

    def _judged(self, logits: mx.array, expected: mx.array, owners: Sequence[int]) -> str:
        arithmetic, bound = self._arithmetic
        difference = arithmetic.judged(errors(logits, expected), owners)
        if difference <= bound:
            return ""
        return f"rows with images differ from a row alone: {described(difference, bound)}"


SCENARIOS: tuple[tuple[Feature, Feature, Callable[[ImageCheck], str]], ...] = (
    ("images", "batch", ImageCheck.stand_ins),
    ("images", "batch", ImageCheck.vectors_matter),
    ("images", "batch", ImageCheck.alone_and_with_text),
    ("images_together", "prefill_together", ImageCheck.prefill_together),
    ("images_restore", "restore", ImageCheck.restored),
    ("images_drafts", "drafts", ImageCheck.drafts),
)


def _walk(count: int, spans: Sequence[MediaSpan]) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Columns of vectors, and (frame, row, column) of each of `count` tokens, one after another."""
    inside = {
        span.start + offset: (span, offset) for span in spans for offset in range(len(span.tokens))
    }
    columns, positions, position = list[int](), list[tuple[int, int, int]](), 0
    for index in range(count):
        if index not in inside:
            positions.append((position,) * 3)
            position += 1
            continue
        span, offset = inside[index]
        _, rows, columns_of_grid = span.shape.grid
        frame, index_in_frame = divmod(offset, rows * columns_of_grid)
        row, column = divmod(index_in_frame, columns_of_grid)
        positions.append((position + frame, position + row, position + column))
        if any(start <= offset < start + length for start, length in span.embedded):
            columns.append(index)
        if index + 1 == span.end:
            position += span.extent
    return columns, positions


def _without(shown: Illustrated, term: int) -> Illustrated:
    """The text with zeros for its images' embeddings (0), or for one of the deepstack layers."""
    images = []
    for image in shown.images:
        arrays = image.arrays()
        arrays[term] = mx.zeros_like(arrays[term])
        images.append(EncodedImage(arrays[0], tuple(arrays[1:])))
    return attrs.evolve(shown, images=tuple(images))
