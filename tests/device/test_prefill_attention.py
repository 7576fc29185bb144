"""The kernel of attention over chunks computes what attention with a mask computes
(trouper/engine/kv/prefill_kernel.py)."""

from __future__ import annotations

import attrs
import mlx.core as mx
import numpy as np
import pytest

from trouper.engine.kv.decode_attention import mask_of
from trouper.engine.kv.decode_kernel import Heads
from trouper.engine.kv.prefill_attention import computes
from trouper.engine.kv.prefill_kernel import DTYPES, PrefillCall, run
from trouper.engine.passes.pass_shapes import of_device

pytestmark = pytest.mark.skipif(
    not of_device().length_kernel, reason="the device has no such kernel"
)
LENGTHS = np.array([0, 1, 63, 64, 65, 500, 1800], np.int32)
"""Tokens of each row before the chunk."""
CAPACITY = 2048
ERROR = {mx.float16: 4e-3, mx.bfloat16: 0.02}
"""Results are of the order of 1."""


@pytest.mark.parametrize("width", [2, 16, 63, 64, 65, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "heads", "key_heads"), [(64, 6, 2), (128, 8, 2), (256, 3, 1)])
def test_each_query_attends_up_to_its_own_position(
    dim: int, heads: int, key_heads: int, dtype: mx.Dtype, width: int
) -> None:
    """Rows are in any slots, and what they have not written may be no numbers."""
    assert computes(dtype, dim)
    count = len(LENGTHS)
    slots = np.arange(count, dtype=np.int32)[::-1] + 1
    sizes = [(count, heads, width, dim), *[(count + 2, key_heads, CAPACITY, dim)] * 2]
    queries, keys, values = (
        mx.random.normal(size, key=key).astype(dtype)
        for size, key in zip(sizes, mx.random.split(mx.random.key(dim + width), 3), strict=True)
    )
    wide = [part[mx.array(slots)].astype(mx.float32) for part in (keys, values)]
    mask = mask_of(Heads(dtype, dim, key_heads, heads // key_heads), LENGTHS, width, CAPACITY)
    expected = mx.fast.scaled_dot_product_attention(
        queries.astype(mx.float32), *wide, scale=0.1, mask=mask[:, None]
    )
    used = np.zeros((count + 2, 1, CAPACITY, 1), bool)
    for slot, length in zip(slots, LENGTHS, strict=True):
        used[slot, :, : length + width] = True
    keys, values = (
        mx.where(mx.array(used), part, mx.array(float("nan"), dtype)) for part in (keys, values)
    )
    places = np.stack([slots, LENGTHS], axis=1)
    call = PrefillCall(queries, keys, values, mx.array(places), 0.1)
    got = run(call)
    error = mx.abs(got.astype(mx.float32) - expected).max().item()
    assert isinstance(error, float) and error < ERROR[dtype]
    few = attrs.evolve(call, queries=queries[2:4], rows=call.rows[2:4])
    assert mx.array_equal(run(few), got[2:4]), "no row's result depends on others"
    behind = mx.array(places + np.array([0, width // 2], np.int32))
    later = attrs.evolve(call, queries=queries[:, :, width // 2 :], rows=behind)
    assert mx.array_equal(run(later), got[:, :, width // 2 :]), "nor on where a chunk begins"
