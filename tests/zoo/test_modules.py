"""Each config of the zoo, played short: rows in company have mlx-lm's own log-probabilities. `just
zoo` plays more."""

from __future__ import annotations

import attrs
import mlx.core as mx
import pytest

from tests.arithmetic import full_float32, skip_if_routed
from tests.zoo.building import build
from tests.zoo.catalogue import BY_PIECES, COARSE, CONFIGS
from tests.zoo.mixes import BOUND, own_loop_error, short_mix, words
from tests.zoo.playing import Play, alone
from tests.zoo.table import PAGE, Line, states
from trouper.engine.adaptations import adaptation_registry

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


def played(name: str) -> Play:
    play = Play(build(name))
    short_mix(play)
    return play


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.long(
    but=(
        "llama",
        "qwen3",
        "gemma3_text",
        "gpt_oss",
        "deepseek_v3",
        "mamba2",
        "falcon_h1",
        "qwen3_5",
        "llama4_text",
        "mixtral",
        "lfm2",
        "phi3small",
        "longcat_flash_ngram",
        "rwkv7",
    )
)
def test_rows_in_company_are_mlx_lms(name: str) -> None:
    skip_if_routed(CONFIGS[name])
    play = played(name)
    assert play.error() <= BOUND
    line = Line.of(name, play)
    page = PAGE.read_text(encoding="utf-8")
    assert states(page, line), "`just zoo` writes the page"
    assert not states(page, attrs.evolve(line, banks=not line.banks))


@full_float32
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - BY_PIECES))
@pytest.mark.long(but=("plamo3", "minicpm3", "llama4_text", "ministral3", "gemma3n"))
def test_an_answer_does_not_follow_from_the_pieces_of_its_prompt(name: str) -> None:
    model = build(name)
    adaptation_registry.adapted(model)
    assert own_loop_error(model) <= COARSE.get(name, BOUND)


@pytest.mark.parametrize("name", sorted({*ADAPTED, "gpt2", "llama4"} - {"plamo3"}))
def test_outside_of_our_passes_nothing_has_changed(name: str) -> None:
    """What is compared with is mlx-lm's own, although the model was adapted."""
    model, tokens, pieces = build(name), words(50, 1), [33, 7, 1, 1, 8]
    before = alone(model, tokens, pieces)
    assert adaptation_registry.adapted(model).names
    assert mx.array_equal(alone(model, tokens, pieces), before)


@full_float32
@pytest.mark.parametrize("name", ADAPTED)
def test_each_adaptation_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the registry the same mix shows a wrong number, or the model raises, or its rows are
    not batched: this comparison can fail."""
    monkeypatch.setattr(adaptation_registry, "REGISTRY", [])
    try:
        play = played(name)
    except (AttributeError, IndexError, TypeError, ValueError):
        return
    assert not play.together or play.error() > 10 * BOUND
