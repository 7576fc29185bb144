"""Checks the image encoder: in small pieces against whole layers."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from trouper.engine.passes.media_pass import EncodedImage
from trouper.engine.platform.error_text import line_of
from trouper.engine.vision.encoder import Encoding
from trouper.engine.vision.layouts import Layout
from trouper.engine.vision.tower import Tower
from trouper.protocol.media import ImageSize, Pixels

PIECE_PATCHES, PIECES = 7, 3
"""Fewest patches of a piece, and most whole pieces of a layer: images of some families have
thousands of patches, whatever their size."""
SEED = 3
MAX_DIFFERENCE = 0.1
"""Of root mean squares. A piece in a wrong place differs by about 1, rounding by up to 0.02."""


def encoder_fault(tower: Tower, layout: Layout) -> str:
    """Return the reason why the encoder cannot be used; "" for none."""
    side = layout.patches.token_size
    size = ImageSize(3 * side, 2 * side, "png")
    shape = layout.shape(size, "low", 256)
    rgb = np.random.RandomState(SEED).randint(0, 256, shape.num_bytes).astype(np.uint8)
    pixels = Pixels.of(shape, rgb.tobytes())
    try:
        in_layers = _encoded(tower, pixels, 0)
        patches = layout.patches.count_patches(shape)
        in_pieces = _encoded(tower, pixels, max(PIECE_PATCHES, patches // PIECES - 1))
    except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
        return f"the encoder fails: {line_of(error)}"
    pairs = zip(in_layers.arrays(), in_pieces.arrays(), strict=True)
    if max(_difference(*pair) for pair in pairs) <= MAX_DIFFERENCE:
        return ""
    return "the encoder's vectors of an image differ with the size of its pieces"


def _encoded(tower: Tower, pixels: Pixels, piece_patches: int) -> EncodedImage:
    encoding = Encoding(tower, pixels, piece_patches)
    while (image := encoding.advance(1)) is None:
        pass
    return image


def _difference(expected: mx.array, computed: mx.array) -> float:
    wide = expected.astype(mx.float32)
    difference = mx.square(computed.astype(mx.float32) - wide).mean()
    size = mx.maximum(mx.square(wide).mean(), 1e-12)
    return float(mx.sqrt(difference / size))
