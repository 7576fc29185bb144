"""Attention within groups is attention to all with a mask, whatever patches a piece has."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trouper.engine.vision.grouped_attention import GroupedHeads, attend_in_groups

HEADS, DIM = 2, 8


@given(
    groups=st.lists(st.sampled_from((1, 2, 3, 7)), min_size=1, max_size=8),
    piece=st.integers(1, 20),
)
def test_groups_attend_to_themselves(groups: list[int], piece: int) -> None:
    count = sum(groups)
    drawn = np.random.RandomState(count).standard_normal((3, 1, HEADS, count, DIM))
    queries, keys, values = (mx.array(part.astype(np.float32)) for part in drawn)
    group = np.repeat(np.arange(len(groups)), groups)
    mask = mx.array(group[:, None] == group)
    expected = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=DIM**-0.5, mask=mask
    )
    heads = GroupedHeads(queries, keys, values, tuple(groups))
    pieces = [
        attend_in_groups(heads, slice(start, start + piece)) for start in range(0, count, piece)
    ]
    assert [part.shape[2] for part in pieces[:-1]] == [piece] * (len(pieces) - 1)
    np.testing.assert_allclose(
        np.array(mx.concatenate(pieces, axis=2)), np.array(expected), atol=1e-5
    )
