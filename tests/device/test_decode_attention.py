"""The kernel of attention by lengths computes what attention with a mask computes
(trouper/engine/kv/decode_kernel.py)."""

from __future__ import annotations

import attrs
import mlx.core as mx
import numpy as np
import pytest

from trouper.engine.kv.decode_attention import mask_of
from trouper.engine.kv.decode_kernel import HEAD_DIMS, Heads, KernelCall, run
from trouper.engine.passes.pass_shapes import MAX_KERNEL_WIDTH, of_device

pytestmark = pytest.mark.skipif(
    not of_device().length_kernel, reason="the device has no such kernel"
)
LENGTHS = np.array([0, 1, 2, 3, 62, 63, 64, 65, 127, 500, 511, 512, 1000, 2000], np.int32)
"""Tokens of each row before the pass: few enough that warps have no key, and enough that several
splits have one."""
RELATIVE = {mx.float32: 1e-3, mx.float16: 2**-10, mx.bfloat16: 2**-8}


def check(heads: Heads, width: int, capacity: int) -> None:
    """Some rows more than the pass has are in the buffers."""
    dice = mx.random.key(heads.dim + heads.group + width)
    rows, all_heads = len(LENGTHS), heads.key_heads * heads.group
    sizes = [
        (rows, all_heads, width, heads.dim),
        *[(rows + 2, heads.key_heads, capacity, heads.dim)] * 2,
        (all_heads,),
    ]
    queries, keys, values, sinks = (
        mx.random.normal(size, key=key).astype(heads.dtype)
        for size, key in zip(sizes, mx.random.split(dice, 4), strict=True)
    )
    wide = [part.astype(mx.float32) for part in (queries, keys[:rows], values[:rows])]
    mask = mask_of(heads, LENGTHS, width, capacity)[:, None]
    expected = mx.fast.scaled_dot_product_attention(
        *wide, scale=0.1, mask=mask, sinks=sinks.astype(mx.float32) if heads.sinks else None
    )
    call = KernelCall(
        queries, keys, values, mx.array(LENGTHS + width), 0.1, sinks if heads.sinks else None
    )
    got = run(heads, call)
    few = run(heads, attrs.evolve(call, queries=queries[:5], lengths=call.lengths[:5]))
    assert mx.array_equal(got[:5], few), "no row's result depends on others"
    np.testing.assert_allclose(
        np.array(got.astype(mx.float32)), np.array(expected), rtol=RELATIVE[heads.dtype], atol=4e-3
    )
    if width > 1 and not heads.ring:
        first = run(
            heads, attrs.evolve(call, queries=queries[:, :, :1], lengths=call.lengths - (width - 1))
        )
        assert mx.array_equal(got[:, :, :1], first), (
            "a verified token comes out as if it had been fed alone"
        )


@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_one_token_of_each_row(dim: int, group: int, dtype: mx.Dtype) -> None:
    check(Heads(dtype, dim, 3, group), 1, 2048)


@pytest.mark.parametrize("width", [2, 3, 5, 9, MAX_KERNEL_WIDTH])
@pytest.mark.parametrize(("dim", "group"), [(64, 2), (128, 4), (256, 1)])
def test_drafts(dim: int, group: int, width: int) -> None:
    check(Heads(mx.bfloat16, dim, 3, group), width, 2048 + MAX_KERNEL_WIDTH)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("ring", "window"), [(128, 128), (160, 128), (1100, 1024)])
def test_rings(ring: int, window: int, sinks: bool) -> None:
    check(Heads(mx.bfloat16, 64, 2, 8, window, ring, sinks), 1, ring)


@pytest.mark.parametrize("width", [1, 5])
def test_sinks(width: int) -> None:
    check(Heads(mx.bfloat16, 64, 2, 8, sinks=True), width, 2048)
