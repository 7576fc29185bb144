"""A pass of mlx-vlm's language models has positions of its own rows, not those of the prompt
before."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.zoo.vlm_playing import build
from trouper import workarounds

LONG, SHORT = mx.arange(1, 10)[None], mx.arange(20, 24)[None]


def difference(name: str) -> float:
    """How far a row's second piece, after another row's prompt, is from the same in a model that
    has seen nothing else. Infinite where it cannot be computed."""
    logits = []
    for others in ((), (SHORT,)):
        model, _ = build(name)
        for other in others:
            model(other, cache=make_prompt_cache(model))
        cache = make_prompt_cache(model)
        try:
            logits.append(mx.concatenate([model(LONG, cache=cache), model(SHORT, cache=cache)], 1))
            mx.eval(logits[-1])
        except ValueError:
            return float("inf")
    return float(mx.max(mx.abs(logits[0] - logits[1])).item())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["glm_ocr", "qwen3_omni_moe"])
def test_rows_have_their_own_positions(name: str) -> None:
    assert difference(name) < 1e-4


def test_it_is_still_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(workarounds.VARIABLE, "mlx_vlm_positions")
    assert difference("glm_ocr") > 1e-2
