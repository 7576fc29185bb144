"""The kernel of attention over chunks computes what attention with a mask computes
(trouper/engine/kv/prefill_kernel.py)."""

from __future__ import annotations

import attrs
import mlx.core as mx
import numpy as np
import pytest

from trouper.engine.kv.decode_kernel import Heads
from trouper.engine.kv.prefill_attention import computes, example
from trouper.engine.kv.prefill_kernel import DTYPES, TILES, run
from trouper.engine.passes.pass_shapes import of_device

pytestmark = pytest.mark.skipif(
    not of_device().length_kernel, reason="the device has no such kernel"
)
LENGTHS = np.array([0, 1, 63, 64, 65, 500, 1800], np.int32)
"""Tokens of each row before the chunk."""
ERROR = {mx.float16: 4e-3, mx.bfloat16: 0.02}
"""Results are of the order of 1."""


def check(heads: Heads, width: int, *, appended: bool = False) -> None:
    assert computes(attrs.evolve(heads, key_heads=1, group=1), appended=appended)
    call, expected = example(heads, LENGTHS, width, appended=appended)
    got = run(heads, call)
    error = mx.abs(got.astype(mx.float32) - expected).max().item()
    assert isinstance(error, float) and error < ERROR[heads.dtype]
    few = attrs.evolve(call, queries=call.queries[2:4], rows=call.rows[2:4])
    assert mx.array_equal(run(heads, few), got[2:4]), "no row's result depends on others"
    if not appended:
        start = width // 2
        later = attrs.evolve(
            call, queries=call.queries[:, :, start:], rows=call.rows + mx.array([0, start])
        )
        assert mx.array_equal(run(heads, later), got[:, :, start:]), "nor on where a chunk begins"


@pytest.mark.parametrize("width", [2, 16, 63, 64, 65, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", TILES)
def test_each_query_attends_up_to_its_own_position(dim: int, dtype: mx.Dtype, width: int) -> None:
    check(Heads(dtype, dim, 2, 3), width)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("dim", "window", "ring"), [(64, 128, 140), (256, 512, 520)])
def test_rings(dim: int, window: int, ring: int, sinks: bool) -> None:
    heads = Heads(mx.bfloat16, dim, 2, 3, window, ring, sinks)
    for width in (2, 60, 300):
        check(heads, width, appended=True)
    for width in (2, 1 + ring - window):
        check(heads, width)


def test_sinks() -> None:
    check(Heads(mx.bfloat16, 64, 2, 8, sinks=True), 100)
