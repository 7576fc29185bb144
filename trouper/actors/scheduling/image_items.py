"""Images on the way to their vectors: decoded by the ImageDecoder, encoded by the engine. Pure.

An *item* is an image for all running rows of one cache scope. Its file is decoded when a row needs
it, since most images of a conversation come from the prefix cache. Few items have pixels at a time.
The encoder runs the layers of one item in slices, which compete with prefill for the stall bound.
Vectors are kept for other rows within a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Literal

import attrs

from trouper.actors.scheduling.sequence import Sequence
from trouper.protocol.media import (
    DecodeImage,
    ImageDecoded,
    ItemId,
    MediaSpan,
    Pixels,
    PromptImage,
)
from trouper.protocol.plans import Encode, Plan, Stepped

DECODED_AHEAD = 2
"""Items with pixels, or ordered: a photo has 12 MB of them."""
IDLE_SLICE_S = 0.5
"""As long as a step of prefill without streams."""
NEWEST = 0.3
"""Weight of the last slice in the average."""
VECTOR_BYTES = 4 * 8192
"""Bytes of a token's vector before any was made: float32 of a large model."""
ItemKey = tuple[bytes, bytes]
"""Key of the cache scope's root, digest."""


@attrs.define(eq=False)
class Item:
    """An image, from the order to its vectors."""

    id: ItemId
    key: ItemKey
    image: PromptImage
    state: Literal["new", "ordered", "decoded", "encoding", "encoded"] = "new"
    pixels: Pixels | None = None
    layers: int = 0
    """Layers that plans have run."""
    nbytes: int = 0
    used_at: int = 0


@attrs.frozen
class NeededImage:
    """A row's image and its item, which other rows and places may share."""

    span: MediaSpan
    item: Item

    @property
    def id(self) -> ItemId:
        return self.item.id

    @property
    def encoded(self) -> bool:
        return self.item.state == "encoded"


@attrs.define
class EncoderBudget:
    """Layers of an item that one step may run, from the speed of past slices."""

    stall_s: float
    # Seconds of one layer for one token; 0 before any measurement.
    _layer_s: float = 0.0

    def layers(self, tokens: int, *, busy: bool) -> int:
        """At least one. `busy`: the step also decodes."""
        if not self._layer_s:
            return 1
        target_s = self.stall_s if busy else IDLE_SLICE_S
        return max(1, int(target_s / (self._layer_s * tokens)))

    def measured(self, layers: int, tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        layer_s = seconds / (layers * tokens)
        before = self._layer_s or layer_s
        self._layer_s = before + NEWEST * (layer_s - before)


@attrs.define(eq=False, kw_only=True)
class ImageItems:
    """`send`: the way to the ImageDecoder. `encoder_layers`: of one image. `max_bytes`: of vectors
    that no row needs; None: no bound."""

    send: Callable[[DecodeImage], object]
    budget: EncoderBudget
    encoder_layers: int = 0
    max_bytes: int | None = None
    num_decoded: int = 0
    num_encoded: int = 0
    num_reused: int = 0
    encode_s: float = 0.0
    _items: dict[ItemKey, Item] = attrs.field(factory=dict, init=False)
    _by_id: dict[ItemId, Item] = attrs.field(factory=dict, init=False)
    _forgotten: list[ItemId] = attrs.field(factory=list, init=False)
    _ids: count[int] = attrs.field(factory=count, init=False)
    _clock: count[int] = attrs.field(factory=lambda: count(1), init=False)
    _encoded_last: bool = attrs.field(default=False, init=False)

    @property
    def busy(self) -> bool:
        """Whether pixels were ordered, whose arrival makes work for the engine."""
        return any(item.state == "ordered" for item in self._items.values())

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self._items.values())

    # -- what rows need --------------------------------------------------------------------------

    def need(self, sequence: Sequence, restored_tokens: int) -> None:
        """Give an entering sequence the items of the images behind the restored prefix."""
        root = sequence.chain.root.key
        sequence.images_left = [
            NeededImage(image.span, self._item((root, image.span.digest), image))
            for image in sequence.client.images
            if image.span.end > restored_tokens
        ]

    def _item(self, key: ItemKey, image: PromptImage) -> Item:
        item = self._items.get(key)
        if item is None:
            item = Item(ItemId(next(self._ids)), key, image)
            self._items[key] = self._by_id[item.id] = item
        else:
            self.num_reused += 1
        return item

    def keep_up(self, prefilling: Iterable[Sequence]) -> None:
        """Order pixels for the rows that prefill, oldest first, and drop what none of them needs:
        unfinished items at once, vectors beyond the bound."""
        if not self._items:
            return
        needed: dict[ItemKey, Item] = {}
        for sequence in prefilling:
            sequence.drop_passed_images()
            for needed_image in sequence.images_left:
                item = self._by_id[needed_image.id]
                needed[item.key] = item
        for item in needed.values():
            item.used_at = next(self._clock)
        unfinished = [item for item in self._items.values() if item.state != "encoded"]
        for item in unfinished:
            if item.key not in needed:
                self._forget(item)
        self._evict(needed)
        self._order(needed.values())

    def _order(self, needed: Iterable[Item]) -> None:
        ahead = sum(item.state in ("ordered", "decoded") for item in self._items.values())
        for item in needed:
            if ahead >= DECODED_AHEAD:
                return
            if item.state == "new":
                item.state = "ordered"
                self.send(DecodeImage(item.id, item.image.source, item.image.span.shape))
                ahead += 1

    def _evict(self, needed: dict[ItemKey, Item]) -> None:
        """Drop unneeded vectors beyond the bound, least recently used first."""
        if self.max_bytes is None:
            return
        spare = sorted(
            (item for item in self._items.values() if item.key not in needed),
            key=lambda item: item.used_at,
        )
        kept_bytes = sum(item.nbytes for item in spare)
        for item in spare:
            if kept_bytes <= self.max_bytes:
                return
            kept_bytes -= item.nbytes
            self._forget(item)

    def _forget(self, item: Item) -> None:
        del self._items[item.key], self._by_id[item.id]
        if item.state in ("encoding", "encoded"):
            self._forgotten.append(item.id)

    def take_forgotten(self) -> tuple[ItemId, ...]:
        """Items that the next plan drops in the engine."""
        forgotten, self._forgotten = tuple(self._forgotten), []
        return forgotten

    # -- news ------------------------------------------------------------------------------------

    def hear(self, decoded: ImageDecoded) -> Item | None:
        """Take an item's pixels. Returns the item if it has none: its requests fail."""
        item = self._by_id.get(decoded.item)
        if item is None or item.state != "ordered":
            return None  # Nobody needs it any more.
        if decoded.pixels is None:
            self._forget(item)
            return item
        item.state, item.pixels = "decoded", decoded.pixels
        self.num_decoded += 1
        return None

    def answered(self, plan: Plan, stepped: Stepped) -> list[tuple[Item, str]]:
        """Take a step's vectors. Returns items whose encoder failed, with the reasons."""
        for order in plan.encode:
            self.budget.measured(order.layers, order.span.num_embedded, stepped.encode_s)
        self.encode_s += stepped.encode_s
        for item_id, nbytes in stepped.encoded:
            if (item := self._by_id.get(item_id)) is not None:
                item.state, item.nbytes = "encoded", nbytes
                self.num_encoded += 1
        failed = []
        for item_id, reason in stepped.unencoded:
            if (item := self._by_id.get(item_id)) is not None:
                self._forget(item)
                failed.append((item, reason))
        return failed

    # -- plans -----------------------------------------------------------------------------------

    def encode(self, *, busy: bool, others_prefill: bool) -> tuple[Encode, ...]:
        """Choose the next slice of one item. `busy`: the step also decodes. `others_prefill`: rows
        have tokens to prefill, with which slices take turns beside streams."""
        item = self._next_item()
        if item is None or (busy and others_prefill and self._encoded_last):
            self._encoded_last = False
            return ()
        self._encoded_last = True
        span, remaining = item.image.span, self.encoder_layers - item.layers
        layers = min(remaining, self.budget.layers(span.num_embedded, busy=busy))
        pixels, item.pixels = item.pixels, None
        item.state = "encoding"
        item.layers += layers
        return (Encode(item.id, span, layers, pixels),)

    def _next_item(self) -> Item | None:
        """The item that was begun, else the one that a row has needed for the longest."""
        waiting = [
            item
            for item in self._items.values()
            if item.state == "decoded"
            or (item.state == "encoding" and item.layers < self.encoder_layers)
        ]
        return min(waiting, key=lambda item: (item.state == "decoded", item.used_at), default=None)
