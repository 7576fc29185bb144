"""The kernel of attention by lengths computes what attention with a mask computes (trouper/engine/kv/decode_attention.py)."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from trouper.engine.kv.decode_attention import HEAD_DIMS, WholeBuffer, attend, supports
from trouper.engine.kv.pass_shapes import of_device
from trouper.engine.kv.region import Region

pytestmark = pytest.mark.skipif(not of_device().length_kernel, reason="the device has no such kernel")
LENGTHS = [0, 1, 2, 3, 62, 63, 64, 65, 127, 500, 1000, 2047]
"""Tokens of each row before the pass: few enough that warps have no key, and enough that all have several."""


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_as_attention_with_a_mask(dim: int, group: int, dtype: mx.Dtype) -> None:
    mx.random.seed(dim + group)
    rows, key_heads, capacity = len(LENGTHS), 3, 2048
    queries = mx.random.normal((rows, key_heads * group, 1, dim)).astype(dtype)
    keys, values = (mx.random.normal((rows + 2, key_heads, capacity, dim)).astype(dtype) for _ in range(2))
    region = Region(0, np.array(LENGTHS, np.int32), np.ones(rows, np.int32), 1, of_device())
    whole = WholeBuffer(keys, region), WholeBuffer(values, region)
    assert supports(queries, *whole, {"scale": 0.1})
    wide = [part.astype(mx.float32) for part in (queries, whole[0].view(), whole[1].view())]
    expected = mx.fast.scaled_dot_product_attention(*wide, scale=0.1, mask=region.mask()[:, None])
    # Rows that are few, or alone, come out the same to the bit: no row's result depends on others.
    got = attend(queries, *whole, 0.1)
    alone = Region(0, np.array(LENGTHS[:5], np.int32), np.ones(5, np.int32), 1, of_device())
    few = attend(queries[:5], WholeBuffer(keys, alone), WholeBuffer(values, alone), 0.1)
    assert mx.array_equal(got[:5], few)
    relative = {mx.float32: 1e-3, mx.float16: 2**-10, mx.bfloat16: 2**-8}[dtype]
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), np.array(expected), rtol=relative, atol=2e-3)
