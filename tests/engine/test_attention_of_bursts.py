"""Attention of several prompts on a device that plans each shape."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.engine.driver import Driver, Request
from tests.families import build, reference
from tests.family_configs import VOCABULARY
from trouper.engine.kv import attention_seam
from trouper.engine.kv.attention_seam import plain, scaled_dot_product_attention
from trouper.engine.passes.pass_shapes import ROUNDED
from trouper.engine.step import StepEngine

ROWS, WIDTH, TOKENS, DIM = 3, 5, 12, 16


def masks() -> dict[str, Any]:
    some = mx.random.uniform(shape=(ROWS, 1, WIDTH, TOKENS), key=mx.random.key(1)) < 0.5
    some[..., 0] = True
    return {
        "none": None,
        "causal": "causal",
        "of each row": some,
        "of each row, added": mx.where(some, 0.0, -1e9).astype(mx.bfloat16),
        "of all rows": some[:1],
        "of a pass": some[0, 0],
    }


def shapes_of(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Shapes of queries that reach MLX; each would have a plan."""
    shapes: list[list[int]] = []

    def noted(queries: mx.array, *args: Any, **options: Any) -> mx.array:
        shapes.append(list(queries.shape))
        return plain(queries, *args, **options)

    monkeypatch.setattr(attention_seam, "plain", noted)
    return shapes


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("name", masks())
def test_a_plan_for_one_row_serves_all(
    name: str, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = shapes_of(monkeypatch)
    monkeypatch.setattr(attention_seam, "prepares_shapes", lambda: planned)
    draws = (
        mx.random.normal((ROWS, heads, width, DIM), mx.bfloat16, key=mx.random.key(heads + width))
        for heads, width in ((6, WIDTH), (2, TOKENS), (2, TOKENS + 1))
    )
    queries, keys, values = draws
    values = values[:, :, :-1]
    mask = masks()[name]
    ours = scaled_dot_product_attention(queries, keys, values, None, 0.25, mask)
    whole = plain(queries, keys, values, None, scale=0.25, mask=mask)
    assert ours.dtype == whole.dtype
    assert mx.abs(ours - whole).max().item() < 0.01  # type: ignore[operator]
    assert shapes == [[1, 6, WIDTH, DIM]] * ROWS if planned else [[ROWS, 6, WIDTH, DIM]]


@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 1)])
def test_lone_prompts_and_decoding_stay_whole(
    rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has the plan anyway; the other has kernels without plans."""
    shapes = shapes_of(monkeypatch)
    monkeypatch.setattr(attention_seam, "prepares_shapes", lambda: True)
    queries = mx.zeros((rows, 2, width, DIM), mx.bfloat16)
    keys = mx.zeros((rows, 2, TOKENS, DIM), mx.bfloat16)
    scaled_dot_product_attention(queries, keys, keys, None, 0.25)
    assert shapes == [[rows, 2, width, DIM]]


def test_float32_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device computes it by separate operations, without plans."""
    shapes = shapes_of(monkeypatch)
    monkeypatch.setattr(attention_seam, "prepares_shapes", lambda: True)
    keys = mx.zeros((ROWS, 2, TOKENS, DIM))
    scaled_dot_product_attention(keys, keys, keys, None, 0.25)
    assert shapes == [[ROWS, 2, TOKENS, DIM]]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "jamba"])
def test_a_burst_answers_as_ever(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, whose tokens can be compared."""
    shapes = shapes_of(monkeypatch)
    monkeypatch.setattr(
        attention_seam, "_is_planned", lambda queries, keys: queries.shape[2] > 1 and keys.ndim == 4
    )
    model = build(name)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15, 16, 17, 18, 19]]
    engine = StepEngine(model, VOCABULARY, shapes=ROUNDED)
    rows = Driver(engine, 4).play([Request(prompt, 6) for prompt in prompts])
    assert [row.tokens for row in rows] == [reference(model, prompt, 6) for prompt in prompts]
    assert all(shape[0] == 1 for shape in shapes if shape[2] > 1)
    assert any(shape[2] > 1 for shape in shapes) or name == "jamba"
