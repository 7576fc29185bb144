"""Images on the way to their vectors: decoded by the ImageDecoder, encoded by the engine. Pure.

An *item* is an image for all running rows of one cache scope. Its file is decoded when a row needs
it, since most images of a conversation come from the prefix cache. The encoder runs the pieces of
one item in slices, which compete with prefill for the stall bound. Vectors are kept for other rows
within a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import count, zip_longest
from typing import Literal, Self

import attrs

from trouper.actors.scheduling.prefill_budget import AIM, IDLE_STEP_S
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.step_statistics import SchedulerCounters
from trouper.actors.scheduling.tenant_shares import Tenant, tenant_of
from trouper.protocol.media import (
    DecodeImage,
    ImageDecoded,
    ImageLayout,
    ItemId,
    MediaSpan,
    Pixels,
    PromptImage,
)
from trouper.protocol.plans import Encode, Plan, Stepped
from trouper.protocol.settings import Settings

DECODED_AHEAD = 2
"""Items with or awaiting pixels, for the rows that may prefill: a photo has 12 MB."""
UNKNOWN_BYTES = 2**28
"""Most bytes of unneeded vectors where the KV memory is unknown."""
NEWEST = 0.3
"""Weight of the last slice in the average."""
CACHE_DIVISOR = 32
"""Unneeded vectors take at most this part of the KV memory, unless --image-cache says."""
NOT_ENCODED = "image_not_encoded"
STATUSES: Mapping[str, int] = {"image_crashes_decoder": 422, "image_decoder_unavailable": 503}
"""Statuses by code; others are 400."""
ItemKey = tuple[bytes, bytes]
"""Key of the cache scope's root, digest."""


@attrs.define(eq=False)
class Item:
    """An image, from the order to its vectors."""

    id: ItemId
    key: ItemKey
    image: PromptImage
    num_pieces: int
    state: Literal["new", "ordered", "decoded", "encoding", "encoded"] = "new"
    pixels: Pixels | None = None
    pieces: int = 0
    """Pieces of the encoder that plans have run."""
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


@attrs.frozen
class UnusableImage:
    """An image without pixels or vectors. `status`: the client's fault, except of decoder and
    encoder."""

    id: ItemId
    digest: bytes
    reason: str
    code: str
    status: int


@attrs.define
class EncoderBudget:
    """Pieces of an item's encoder that one step may run, from the speed of past slices."""

    stall_s: float
    # Seconds of one piece for each token of the image; 0 before any measurement. Attention grows
    # with the image, the rest of a piece does not: larger images are slower to a lesser degree.
    _piece_s: float = 0.0

    def pieces(self, tokens: int, *, busy: bool) -> int:
        """At least one. `busy`: the step also decodes."""
        if not self._piece_s:
            return 1
        target_s = self.stall_s if busy else IDLE_STEP_S
        return max(1, int(target_s / (self._piece_s * tokens)))

    def measured(self, pieces: int, tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        piece_s = seconds / (pieces * tokens)
        before = self._piece_s or piece_s
        self._piece_s = before + NEWEST * (piece_s - before)


@attrs.define(eq=False, kw_only=True)
class ImageItems:
    """`send`: the way to the ImageDecoder. `ids`: never used before, also by a scheduler that has
    crashed, whose pixels may still come. `layout`: None if the model takes no images. `max_bytes`:
    of vectors that no row needs; None: a part of the KV memory."""

    send: Callable[[DecodeImage], object]
    ids: Iterator[int]
    budget: EncoderBudget
    counters: SchedulerCounters
    layout: ImageLayout | None = None
    max_bytes: int | None = None
    _items: dict[ItemKey, Item] = attrs.field(factory=dict, init=False)
    _by_id: dict[ItemId, Item] = attrs.field(factory=dict, init=False)
    _forgotten: list[ItemId] = attrs.field(factory=list, init=False)
    _ordered: set[ItemId] = attrs.field(factory=set, init=False)
    """Items whose pixels are to come, needed or not."""
    _clock: count[int] = attrs.field(factory=lambda: count(1), init=False)
    _encoded_last: bool = attrs.field(default=False, init=False)

    @classmethod
    def of(
        cls,
        layout: ImageLayout | None,
        settings: Settings,
        send: Callable[[DecodeImage], object],
        ids: Iterator[int],
        counters: SchedulerCounters,
    ) -> Self:
        return cls(
            send=send,
            ids=ids,
            counters=counters,
            budget=EncoderBudget(settings.decode_stall_ms / 1000 * AIM),
            layout=layout,
            max_bytes=None if settings.image_cache is None else int(settings.image_cache),
        )

    @property
    def busy(self) -> bool:
        """Whether pixels were ordered, whose arrival makes work for the engine."""
        return bool(self._ordered)

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self._items.values()) if self._items else 0

    # -- what rows need --------------------------------------------------------------------------

    def need(self, sequence: Sequence) -> None:
        root = sequence.chain.root.key
        sequence.images_left = [
            NeededImage(image.span, self._item((root, image.span.digest), image))
            for image in sequence.client.images
        ]
        # Those of the restored prefix need no pixels.
        sequence.drop_passed_images()

    def _item(self, key: ItemKey, image: PromptImage) -> Item:
        item = self._items.get(key)
        if item is None:
            assert self.layout is not None, "an image for a model that takes none"
            num_pieces = self.layout.num_pieces(image.span.shape)
            item = Item(ItemId(next(self.ids)), key, image, num_pieces)
            self._items[key] = self._by_id[item.id] = item
        return item

    def keep_up(
        self, prefilling: Iterable[Sequence], allowed: Iterable[Sequence], kv_bytes: int | None
    ) -> None:
        """Order pixels for the rows that may prefill, oldest first, and drop what no row needs:
        unfinished items at once, vectors beyond the bound. `allowed`: of those that prefill.
        `kv_bytes`: the KV memory; None: unknown."""
        if not self._items:
            return
        for sequence in prefilling:
            sequence.drop_passed_images()
        needed = self._needed_by(prefilling)
        for item in needed.values():
            item.used_at = next(self._clock)
        unfinished = [item for item in self._items.values() if item.state != "encoded"]
        for item in unfinished:
            if item.key not in needed:
                self._forget(item)
        self._evict(needed, kv_bytes)
        self._order(self._needed_by(allowed).values())

    def _needed_by(self, rows: Iterable[Sequence]) -> dict[ItemKey, Item]:
        """Items in turns of tenants: one image may take the decoder seconds, and a request has many
        of them. A tenant's oldest row is first."""
        queues = dict[Tenant, list[Item]]()
        for row in rows:
            queue = queues.setdefault(tenant_of(row), [])
            queue += [self._by_id[left.id] for left in row.images_left]
        turns = zip_longest(*queues.values())
        return {item.key: item for turn in turns for item in turn if item is not None}

    @staticmethod
    def ready_to_prefill(prefilling: Iterable[Sequence]) -> list[Sequence]:
        """Return the rows with tokens to prefill. Others wait for an image."""
        ready = []
        for sequence in prefilling:
            if sequence.next_chunk:
                sequence.go_on()
                ready.append(sequence)
            else:
                sequence.wait_for_image()
        return ready

    def _order(self, needed: Collection[Item]) -> None:
        ahead = len(self._ordered) + sum(item.state == "decoded" for item in needed)
        for item in needed:
            if ahead >= DECODED_AHEAD:
                return
            if item.state == "new":
                item.state = "ordered"
                self._ordered.add(item.id)
                self.send(DecodeImage(item.id, item.image.source, item.image.span.shape))
                ahead += 1

    def _evict(self, needed: Mapping[ItemKey, Item], kv_bytes: int | None) -> None:
        """Drop unneeded vectors beyond the bound, least recently used first."""
        max_bytes = self.max_bytes
        if max_bytes is None:
            max_bytes = UNKNOWN_BYTES if kv_bytes is None else kv_bytes // CACHE_DIVISOR
        spare = sorted(
            (item for item in self._items.values() if item.key not in needed),
            key=lambda item: item.used_at,
        )
        kept_bytes = sum(item.nbytes for item in spare)
        for item in spare:
            if kept_bytes <= max_bytes:
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

    def hear(self, decoded: ImageDecoded) -> list[UnusableImage]:
        """Take an item's pixels. Returns an item without pixels: its requests fail."""
        self._ordered.discard(decoded.item)
        self.counters.add(image_decoder_seconds=decoded.seconds)
        item = self._by_id.get(decoded.item)
        if item is None or item.state != "ordered":
            return []  # The rows that needed the image have left.
        if decoded.pixels is None:
            self._forget(item)
            status = STATUSES.get(decoded.code, 400)
            return [UnusableImage(item.id, item.key[1], decoded.fault, decoded.code, status)]
        item.state, item.pixels = "decoded", decoded.pixels
        self.counters.add(images_decoded=1)
        return []

    def answered(self, plan: Plan, stepped: Stepped) -> list[UnusableImage]:
        """Take a step's vectors. Returns items whose encoder failed: their requests fail."""
        for order in plan.encode:
            self.budget.measured(order.pieces, order.span.num_embedded, stepped.encode_s)
        for item_id, nbytes in stepped.encoded:
            if (item := self._by_id.get(item_id)) is not None:
                item.state, item.nbytes = "encoded", nbytes
        if plan.encode:
            encoded = len(stepped.encoded)
            self.counters.add(images_encoded=encoded, encoder_seconds=stepped.encode_s)
        failed = []
        for item_id, reason in stepped.unencoded:
            if (item := self._by_id.get(item_id)) is not None:
                self._forget(item)
                failed.append(UnusableImage(item_id, item.key[1], reason, NOT_ENCODED, 500))
        return failed

    # -- plans -----------------------------------------------------------------------------------

    def encode(
        self, rows: Iterable[Sequence], *, busy: bool, others_prefill: bool
    ) -> tuple[Encode, ...]:
        """Choose the next slice of one item that `rows` need. `busy`: the step also decodes.
        `others_prefill`: rows have tokens to prefill, with which slices take turns beside
        streams."""
        item = self._next_item(rows) if self._items else None
        if item is None or (busy and others_prefill and self._encoded_last):
            self._encoded_last = False
            return ()
        self._encoded_last = True
        span, remaining = item.image.span, item.num_pieces - item.pieces
        pieces = min(remaining, self.budget.pieces(span.num_embedded, busy=busy))
        pixels, item.pixels = item.pixels, None
        item.state = "encoding"
        item.pieces += pieces
        last = item.pieces == item.num_pieces
        return (Encode(item.id, span, pieces, pixels, last),)

    def _next_item(self, rows: Iterable[Sequence]) -> Item | None:
        """The item that was begun, else the oldest row's first."""
        waiting = [
            item
            for item in self._needed_by(rows).values()
            if item.state == "decoded"
            or (item.state == "encoding" and item.pieces < item.num_pieces)
        ]
        return min(waiting, key=lambda item: (item.state == "decoded", item.used_at), default=None)
