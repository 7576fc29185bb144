"""Attention in parts is attention at once, within its bound of memory."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.arithmetic import cpu_only
from trouper.engine.vision import bounded_attention
from trouper.engine.vision.bounded_attention import attend, rotate, rotation_of

HEADS, PATCHES, DIM = 3, 50, 72


def drawn(seed: int) -> mx.array:
    values = np.random.RandomState(seed).standard_normal((1, HEADS, PATCHES, DIM))
    return mx.array(values.astype(np.float32))


@pytest.mark.parametrize("queries_at_once", [1, 7, 49, 50, 1000])
def test_queries_in_parts(queries_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, values = map(drawn, range(3))
    scores = np.array(queries) @ np.array(keys).swapaxes(2, 3) / DIM**0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ np.array(values)
    bound = 4 * HEADS * PATCHES * queries_at_once
    monkeypatch.setattr(bounded_attention, "MAX_SCORE_BYTES", bound)
    for patches in (slice(0, PATCHES), slice(20, 33)):
        attended = np.array(attend(queries, keys, values, patches))
        np.testing.assert_allclose(attended, expected[:, :, patches], atol=1e-2)


@cpu_only
def test_scores_of_a_large_image_stay_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2,048 patches all scores would take 67 MB, and their weights as much."""
    monkeypatch.setattr(bounded_attention, "MAX_SCORE_BYTES", 2**20)
    queries, keys, values = (mx.zeros((1, 4, 2048, 16)) for _ in range(3))
    mx.eval(queries, keys, values)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(attend(queries, keys, values, slice(0, 2048)))
    assert mx.get_peak_memory() - before < 8 * 2**20


def test_a_rotation_keeps_lengths_and_turns_by_rows_and_columns() -> None:
    angles = np.ones((PATCHES, DIM // 4)), np.zeros((PATCHES, DIM // 4))
    x = drawn(4)
    turned = np.array(rotate(x, *rotation_of(angles)))
    np.testing.assert_allclose(np.square(turned).sum(-1), np.square(np.array(x)).sum(-1), rtol=1e-4)
    quarter = slice(DIM // 4, DIM // 2)
    assert np.allclose(turned[..., quarter], np.array(x)[..., quarter])
    assert not np.allclose(turned[..., : DIM // 4], np.array(x)[..., : DIM // 4])
