"""Checks rows with images on the real model: in chunks beside text, against one pass alone.

Embeddings of random tokens stand for an encoder's vectors: what is checked are positions, chunks
and company.
"""

from __future__ import annotations

import attrs
import mlx.core as mx
import numpy as np
from mlx import nn

from trouper.engine.adaptations.image_passes import embedding_of
from trouper.engine.kv.quantized_kv import KvFormat
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.passes.media_pass import EncodedImage
from trouper.engine.passes.pass_shapes import of_device
from trouper.engine.platform.error_text import line_of
from trouper.engine.self_check.accuracy import arithmetic_of, errors, random_texts
from trouper.engine.self_check.scenarios import ForcedRows
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.media import ImageLayout, ImageShape, MediaSpan, chunk_end
from trouper.protocol.plans import RowId

START, BEHIND, DECODED = 5, 9, 3
"""Tokens before and behind the image, of which the last are decoded."""
COMPANY = 11
"""Tokens of the row of text."""
GRID = (1, 3, 2)
SEED = 3
TEXT, IMAGE = range(2)


@attrs.frozen(eq=False)
class ImageCheck:
    """`deepstack`: number of layers that get vectors."""

    model: nn.Module
    layout: ImageLayout
    deepstack: int
    vocabulary: int
    kv: KvFormat
    capabilities: Capabilities

    def fault(self) -> str:
        """Return the reason why rows with images cannot be served; "" for none."""
        try:
            difference, bound = self._difference()
        except Exception as error:  # noqa: BLE001
            # Any architecture's code: whatever it raises is the finding.
            return f"a pass with an image fails: {line_of(error)}"
        if difference <= bound:
            return ""
        return (
            "rows with images differ from a row alone: log-probabilities by "
            f"{difference:.2g} of the logits' spread, where rounding makes up to {bound:.2g}"
        )

    def _difference(self) -> tuple[float, float]:
        """The error of a row in chunks and company, and its bound."""
        text, before, behind = random_texts((COMPANY, START, BEHIND), self.vocabulary, SEED)
        span = self.layout.span(START, ImageShape((1, 1), GRID), bytes(32))
        tokens = [*before, *span.tokens, *behind]
        reference = {
            TEXT: self._alone(text, (), (len(text),)),
            IMAGE: self._alone(tokens, (span,), (len(tokens),)),
        }
        arithmetic = arithmetic_of(self.model, self.kv)
        in_chunks = self._alone(text, (), (3, len(text) - 3))
        noise = arithmetic.judged(errors(in_chunks, reference[TEXT]), [TEXT] * len(text))
        rows = self._in_company(text, tokens, span)
        expected = [reference[taken.text][taken.position] for taken in rows.taken]
        found = errors(mx.stack([taken.logits for taken in rows.taken]), mx.stack(expected))
        owners = [taken.text for taken in rows.taken]
        return arithmetic.judged(found, owners), arithmetic.bound(noise)

    def _in_company(self, text: list[int], tokens: list[int], span: MediaSpan) -> ForcedRows:
        """The image's row prefills in two chunks, cut inside the image, or before an image that
        cannot be cut, and decodes beside text."""
        slots = self._slots()
        rows = ForcedRows(slots, [text, tokens])
        other, row = rows.open(TEXT, IMAGE)
        slots.images.open(row, (span,))
        first, prompt = chunk_end((span,), 0, START + 2), len(tokens) - DECODED
        for start, stop, company in ((0, first, 4), (first, prompt, COMPANY - DECODED - 4)):
            touched = slots.images.touches(row, start, stop)
            slots.images.show(row, start, stop, [self._vectors(span)] if touched else [])
            rows.step({other: company, row: stop - start})
        rows.step(joining=[other, row])
        for _ in range(DECODED - 1):
            rows.step()
        return rows

    def _alone(
        self, tokens: list[int], spans: tuple[MediaSpan, ...], chunks: tuple[int, ...]
    ) -> mx.array:
        """Logits (tokens, vocabulary) of one row."""
        slots, row, start = self._slots(), RowId(0), 0
        slots.open(row, len(tokens))
        slots.images.open(row, spans)
        logits = []
        for count in chunks:
            slots.images.show(row, start, start + count, [self._vectors(span) for span in spans])
            logits.append(slots.score(row, tokens[start : start + count]))
            start += count
        return mx.concatenate(logits)

    def _slots(self) -> SlotRows:
        return SlotRows(self.model, self.capabilities, self.kv, 0, of_device())

    def _vectors(self, span: MediaSpan) -> EncodedImage:
        random = np.random.RandomState(SEED)
        count = span.num_embedded * (1 + self.deepstack)
        drawn = mx.array(random.randint(1, max(self.vocabulary // 2, 2), count))
        embeddings, *deepstack = mx.split(embedding_of(self.model)(drawn), 1 + self.deepstack)
        return EncodedImage(embeddings, tuple(deepstack))
