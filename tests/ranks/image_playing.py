"""One rank that loads models and answers prompts with images: `python -m tests.ranks.image_playing
SPEC`. Its last line is what each row of each model answered."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from mlx import nn

from tests.engine.driver import Request
from tests.engine.vision.driver import ImageDriver, ImageRequest
from tests.engine.vision.families import TOKEN_IDS, VisionModel, preprocessor_of, text
from tests.engine.vision.test_image_rows import TOKENS, one_image, two_images
from trouper.engine.distributed.rank_group import RankGroup, join
from trouper.engine.loading.model_loading import load
from trouper.engine.step import StepEngine
from trouper.engine.vision.layouts import layout_of
from trouper.engine.vision.tower import patches_at_once
from trouper.protocol.media import ImageLayout, ItemId, MediaSpan, Pixels
from trouper.protocol.plans import Encode, Stepped
from trouper.protocol.settings import Settings

BLIND = ItemId(90)


def main() -> None:
    group = join()
    played = {
        name: play(name, Path(one["directory"]), one["seeds"], group)
        for name, one in json.loads(sys.argv[1]).items()
    }
    sys.stdout.write(json.dumps({"rank": group.rank, **played}) + "\n")


def play(name: str, directory: Path, seeds: Sequence[int], group: RankGroup) -> dict[str, Any]:
    """Two rows with images and one of text, in odd chunks, and an image whose encoder fails."""
    lines: list[str] = []
    loaded = load(Settings(model=str(directory), no_ssd=True), lines.append, group=group)
    layout = layout_of(loaded.config, preprocessor_of(name), TOKEN_IDS)
    layout = attrs.evolve(layout, piece_patches=patches_at_once())
    assert loaded.images.tower is not None, lines
    engine = StepEngine(
        loaded.model,
        loaded.card.vocab_size,
        loaded.kv,
        None,
        group,
        tower=loaded.images.tower,
        capabilities=loaded.card.capabilities,
    )
    driver = RanksDriver(engine, 7)
    driver.layout = layout
    # `prompt` needs the layout alone.
    model = VisionModel(name, directory, loaded.model, None, layout, nn.Module())  # type: ignore[arg-type]
    prompts = [
        model.prompt(make(seed)) for make, seed in zip((two_images, one_image), seeds, strict=True)
    ]
    requests: list[Request] = [Request(text(19, 20), TOKENS)]
    for tokens, spans, pictures in prompts:
        items = driver.encode(spans, pictures, pieces=2)
        requests.append(ImageRequest(tokens, TOKENS, join=1, media=spans, items=items))
    rows = driver.play(requests)
    failed = driver.fail(prompts[1][1][0], prompts[1][2][0])
    assert engine._encoder is not None
    return {
        "tokens": [row.tokens for row in rows],
        "vector_bytes": engine._encoder.nbytes,
        "members": sorted(engine._encoder.members),
        "weights": loaded.images.nbytes,
        "unencoded": [list(fault) for fault in failed.unencoded],
    }


class RanksDriver(ImageDriver):
    """Says which order of an image is the last."""

    layout: ImageLayout

    def encode(
        self, spans: Sequence[MediaSpan], images: Sequence[Pixels], pieces: int = 2
    ) -> tuple[ItemId, ...]:
        items = []
        for span, pixels in zip(spans, images, strict=True):
            item = ItemId(self.next_item)
            self.next_item += 1
            remaining = self.layout.num_pieces(span.shape)
            order = Encode(item, span, pieces, pixels)
            while remaining > 0:
                order = attrs.evolve(order, last=remaining <= pieces)
                stepped = self.step(encode=(order,))
                assert bool(stepped.encoded) == order.last
                remaining -= pieces
                order = attrs.evolve(order, pixels=None)
            items.append(item)
        return tuple(items)

    def fail(self, span: MediaSpan, pixels: Pixels) -> Stepped:
        """The first slice fails on rank 0, and the last one comes all the same."""
        broken = attrs.evolve(pixels, rgb=b"")
        order = Encode(BLIND, span, 1, broken)
        self.step(encode=(order,))
        return self.step(encode=(attrs.evolve(order, pixels=None, last=True),))


if __name__ == "__main__":
    main()
