"""What 8 bits a value cost the embedded model, in bytes and in nats. `python -m benchmarks.kv_bits`
says more."""

from __future__ import annotations

import numpy as np

from benchmarks.kv_bits import divergence, text
from tests.family_configs import LONG
from tests.model.test_smollm import smollm
from trouper.engine.kv.kv_layout import layout_of
from trouper.engine.kv.quantized_kv import PLAIN, KvFormat

SOME = 400 if LONG else 48


def test_eight_bits_say_almost_the_same() -> None:
    loaded = smollm()
    eight = divergence(loaded.model, loaded.tokenizer.encode(text())[:SOME], KvFormat(8))
    assert 0 < eight.mean_kl < 1e-3
    assert eight.same_best > 0.97


def test_four_bits_say_something_else() -> None:
    """The measure can tell."""
    loaded = smollm()
    four = divergence(loaded.model, loaded.tokenizer.encode(text())[:SOME], KvFormat(4))
    assert four.mean_kl > 1e-2


def test_eight_bits_weigh_little_more_than_half_of_bfloat16() -> None:
    """In float32, where scales and biases are twice as large as beside bfloat16."""
    model = smollm().model
    bfloat16 = sum(int(np.prod(shape.dims)) * 2 for shape in layout_of(model, PLAIN).sliceable)
    assert layout_of(model, KvFormat(8)).token_bytes <= 0.57 * bfloat16
