"""Each config of the zoo, played short: rows in company have mlx-lm's own log-probabilities. `just zoo` plays more."""

from __future__ import annotations

import pytest

from tests.zoo.building import build
from tests.zoo.catalogue import CONFIGS
from tests.zoo.mixes import BOUND, short_mix
from tests.zoo.playing import Play
from trouper.engine import adaptations

ADAPTED = (
    "afm7",
    "deepseek_v32",
    "gemma2",
    "glm_moe_dsa",
    "gpt_bigcode",
    "internlm2 with dynamic rope",
    "internlm3 with dynamic rope",
    "llama with dynamic rope",
    "longcat_flash_ngram",
    "minimax_m3_vl",
    "phi3small",
    "plamo3",
)


def error_of(name: str) -> float:
    play = Play(build(name))
    short_mix(play)
    return play.error()


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_in_company_are_mlx_lms(name: str) -> None:
    assert error_of(name) <= BOUND


@pytest.mark.parametrize("name", ADAPTED)
def test_each_adaptation_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the registry the same mix shows a wrong number, or the model raises: this comparison can fail."""
    monkeypatch.setattr(adaptations, "REGISTRY", [])
    try:
        error = error_of(name)
    except (AttributeError, IndexError, TypeError, ValueError):
        return
    assert error > 10 * BOUND
