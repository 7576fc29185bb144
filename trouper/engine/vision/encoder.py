"""Runs the encoder in slices, and keeps the vectors of images by item."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import mlx.core as mx

from trouper.engine.passes.media_pass import EncodedImage
from trouper.engine.platform.error_text import lacks_memory, line_of
from trouper.engine.vision.tower import Tower, patches_at_once
from trouper.engine.vision.vector_sharing import DistantTower, VectorSharing
from trouper.protocol.media import ItemId, Pixels
from trouper.protocol.plans import Encode

NOT_NUMBERS = "its vectors are no numbers: the image's values are beyond the encoder's precision"


@attrs.define(eq=False)
class Encoding:
    """An image between two slices."""

    tower: Tower
    pixels: Pixels
    piece_patches: int = attrs.field(factory=patches_at_once)
    """0: all."""
    embedded: tuple[mx.array, Any] | None = None
    """Hidden states before the layer at work, after the first piece, and the tower's `places`."""
    deepstack: list[mx.array] = attrs.field(factory=list)
    layer: int = 0
    """Number of layers that have run."""
    heads: Any = None
    """Queries, keys and values of the layer at work."""
    done: list[mx.array] = attrs.field(factory=list)
    """Hidden states of the first patches after the layer at work."""

    def advance(self, pieces: int) -> EncodedImage | None:
        """Run the next pieces, and wait for each. Returns the vectors after the last one."""
        # All pieces have the same rows in each run: products of other sizes round otherwise, and an
        # image's vectors must not depend on the load.
        for _ in range(pieces):
            self._run_piece()
            if self.layer == self.tower.num_layers:
                return self._finish()
            # Else a GPU holds the arrays of all layers: 7 GB more for 16,384 patches.
            mx.eval(self.embedded, self.heads, self.done, self.deepstack)
        return None

    def _run_piece(self) -> None:
        if self.embedded is None:
            self.embedded = self.tower.embed(self.pixels)
            return
        hidden, places = self.embedded
        if self.heads is None:
            self.heads = self.tower.project_heads(self.layer, hidden, places)
        size = self.piece_patches or len(hidden)
        patches = slice(len(self.done) * size, (len(self.done) + 1) * size)
        self.done.append(self.tower.run_patches(self.layer, hidden, self.heads, patches))
        if patches.stop < len(hidden):
            return
        hidden = mx.concatenate(self.done)
        self.embedded = hidden, places
        added = self.tower.deepstack_of(self.layer, hidden)
        if added is not None:
            self.deepstack.append(added)
        self.layer += 1
        self.heads, self.done = None, []

    def _finish(self) -> EncodedImage:
        assert self.embedded is not None
        size = self.pixels.height, self.pixels.width
        vectors = self.tower.project(self.embedded[0], size)
        image = EncodedImage(vectors / self.tower.embedding_scale, tuple(self.deepstack))
        mx.eval(image.arrays())
        return image


@attrs.frozen
class EncodeResults:
    """Of one step, for `Stepped`."""

    encoded: tuple[tuple[ItemId, int], ...] = ()
    failed: tuple[tuple[ItemId, str], ...] = ()
    seconds: float = 0.0


NOTHING_ENCODED = EncodeResults()


@attrs.define(eq=False)
class ImageEncoder:
    """The items of one session of the engine."""

    tower: Tower | DistantTower
    sharing: VectorSharing | None = None
    members: set[ItemId] = attrs.field(factory=set)
    """Items that were begun and not forgotten, also those that failed."""
    _encodings: dict[ItemId, Encoding] = attrs.field(factory=dict)
    _images: dict[ItemId, EncodedImage] = attrs.field(factory=dict)

    def encode(self, orders: Sequence[Encode]) -> EncodeResults:
        """Carry out a plan's orders. A fault of one image ends that item alone; raises where the
        device lacks memory."""
        began = time.perf_counter()
        encoded, failed = list[tuple[ItemId, int]](), list[tuple[ItemId, str]]()
        for order in orders:
            self.members.add(order.item)
            image, fault = self._try(order)
            if self.sharing is not None and order.last:
                # Also after a fault: the other ranks wait.
                image = self.sharing.share(order.span.num_embedded, image)
            if image is None and not fault:
                continue
            self._encodings.pop(order.item, None)
            if image is not None and not fault and _is_finite(image):
                self._images[order.item] = image
                encoded.append((order.item, image.nbytes))
            else:
                failed.append((order.item, fault or NOT_NUMBERS))
        return EncodeResults(tuple(encoded), tuple(failed), time.perf_counter() - began)

    def images(self, items: Iterable[ItemId]) -> list[EncodedImage]:
        return [self._images[item] for item in items]

    def forget(self, items: Iterable[ItemId]) -> None:
        """Drop items, known or not."""
        for item in items:
            self.members.discard(item)
            self._encodings.pop(item, None)
            self._images.pop(item, None)

    @property
    def nbytes(self) -> int:
        return sum(image.nbytes for image in self._images.values())

    def _try(self, order: Encode) -> tuple[EncodedImage | None, str]:
        """The image after its last piece, and a fault. Raises where the device lacks memory."""
        if isinstance(self.tower, DistantTower):
            return None, ""
        try:
            return self._advance(order), ""
        except Exception as error:
            if lacks_memory(error):
                raise  # The next scheduler leaves more memory to a step, and tries again.
            return None, line_of(error)

    def _advance(self, order: Encode) -> EncodedImage | None:
        assert not isinstance(self.tower, DistantTower)
        if order.pixels is not None:
            self._encodings[order.item] = Encoding(self.tower, order.pixels)
        image = self._encodings[order.item].advance(order.pieces)
        if self.sharing is not None and order.last != (image is not None):
            raise ValueError("the encoder has another number of pieces than was planned")
        if image is not None and len(image.embeddings) != order.span.num_embedded:
            raise ValueError(
                f"the encoder made {len(image.embeddings)} vectors for a span of "
                f"{order.span.num_embedded}"
            )
        return image


def _is_finite(image: EncodedImage) -> bool:
    return all(bool(mx.isfinite(array).all().item()) for array in image.arrays())
