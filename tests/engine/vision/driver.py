"""The engine's driver with images: encoded first, then part of rows."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from tests.engine.driver import Driver, Request, Row
from trouper.protocol.media import ItemId, MediaSpan, Pixels, chunk_end
from trouper.protocol.plans import Admit, Chunk, Encode, Plan, Stepped


@attrs.frozen
class ImageRequest(Request):
    media: tuple[MediaSpan, ...] = ()
    items: tuple[ItemId, ...] = ()
    """Encoded images of `media`."""

    def end_of(self, start: int, tokens: int) -> int:
        return chunk_end(self.media, start, start + tokens)


class ImageDriver(Driver):
    """Gives rows their spans, and chunks the items that they touch."""

    next_item = 0

    def encode(
        self, spans: Sequence[MediaSpan], images: Sequence[Pixels], pieces: int = 2
    ) -> tuple[ItemId, ...]:
        """Encode images one after another, some pieces a step."""
        items = []
        for span, pixels in zip(spans, images, strict=True):
            item = ItemId(self.next_item)
            self.next_item += 1
            order = Encode(item, span, pieces, pixels)
            while item not in dict(self.step(encode=(order,)).encoded):
                order = attrs.evolve(order, pixels=None)
            items.append(item)
        return tuple(items)

    def step(self, **orders: object) -> Stepped:
        """One step without the driver's rows."""
        plan = Plan(self._step, **orders)  # type: ignore[arg-type]
        self._step += 1
        return self.engine.collect(self.engine.launch(plan))

    def _plan(self, dropped: list[Row], entering: list[Row], now: int) -> Plan:
        plan = super()._plan(dropped, entering, now)
        return attrs.evolve(
            plan,
            admit=tuple(map(self._with_media, plan.admit)),
            prefill=tuple(map(self._with_items, plan.prefill)),
        )

    def _with_media(self, admit: Admit) -> Admit:
        request = self._rows[admit.row].request
        if not isinstance(request, ImageRequest):
            return admit
        return attrs.evolve(admit, media=request.media)

    def _with_items(self, chunk: Chunk) -> Chunk:
        row = self._rows[chunk.row]
        request = row.request
        if not isinstance(request, ImageRequest):
            return chunk
        start, stop = row.prefilled - chunk.tokens, row.prefilled
        touched = zip(request.media, request.items, strict=True)
        items = [item for span, item in touched if span.start < stop and start < span.end]
        return attrs.evolve(chunk, items=tuple(items))
