"""Without our adaptations the check alone turns off what mlx-lm's models do wrong in a batch, by
the way that loading takes: a tiny model of the config, and a short pass of the model itself.

TROUPER_LONG_TESTS=1 in the environment checks the whole zoo.
"""

from __future__ import annotations

import os

import attrs
import pytest
from mlx import nn

from tests.self_check.full_size import FULL_SIZE
from tests.zoo import vlm_playing
from tests.zoo.building import build
from tests.zoo.catalogue import CONFIGS
from trouper.engine.adaptations import adaptation_registry
from trouper.engine.adaptations.adaptation_registry import Adaptation, Adapted
from trouper.engine.kv.model_caches import by_caches
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.passes.pass_shapes import EXACT
from trouper.engine.self_check import tiny
from trouper.engine.self_check.accuracy import WrongAloneError
from trouper.engine.self_check.checking import Check
from trouper.protocol.capabilities import Capabilities

FAULTY = {
    "afm7": "rows of different lengths that decode together differ",
    "llama with dynamic rope": "rows of different lengths that decode together",
    "internlm2 with dynamic rope": "rows of different lengths that decode together",
    "internlm3 with dynamic rope": "rows of different lengths that decode together",
    "gpt_bigcode": "rows of different lengths that decode together",
    "glm_moe_dsa": "FullSlots",
    "deepseek_v32": "FullSlots",
    "longcat_flash_ngram": "a prompt of one token",
    "gemma2": "",
    "minimax_m3_vl": "FullSlots",
}
"""What the reason must say, of those that raise mlx-lm's or MLX's own words."""
ONE_OF_EACH = (
    "afm7",
    "llama with dynamic rope",
    "gpt_bigcode",
    "glm_moe_dsa",
    "longcat_flash_ngram",
    "gemma2",
)
"""Of each reason one."""
FULL_SIZE_FAULTY = ("AFM-3B", "SantaCoder-1B", "GLM-5", "LongCat-Flash-Lite")
SOME = ("deepseek_v2", "gemma3n", "granitemoehybrid", "llama4", "qwen3_next", "rwkv7")
LONG = bool(os.environ.get("TROUPER_LONG_TESTS"))


@pytest.fixture
def no_adaptations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptation_registry, "REGISTRY", [])


def check(name: str, model: nn.Module) -> Capabilities:
    return Check(model, CONFIGS[name], 512, PLAIN, "fast").run().capabilities


@pytest.mark.parametrize("name", FAULTY)
@pytest.mark.long(but=ONE_OF_EACH)
@pytest.mark.usefixtures("no_adaptations")
def test_the_check_alone_turns_off_what_is_wrong(name: str) -> None:
    model = build(name)
    assert by_caches(model).allows("batch"), "nothing says so before"
    found = check(name, model)
    assert FAULTY[name] in found.batch
    assert found.batch


def test_an_adaptation_that_is_wrong_for_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of five axes for all that is named gemma2, as a list of names once had it."""
    name = "gemma2 with as many KV heads as heads"

    def five_axes(_: nn.Module, found: Adapted) -> bool:
        found.traits = attrs.evolve(found.traits, mask_rank=5)
        return True

    monkeypatch.setattr(adaptation_registry, "REGISTRY", [])
    assert attrs.evolve(check(name, build(name)), banks="") == Capabilities()
    monkeypatch.setattr(adaptation_registry, "REGISTRY", [Adaptation("by name", five_axes)])
    assert check(name, build(name)).batch


@pytest.mark.parametrize("name", FAULTY)
@pytest.mark.long(but=ONE_OF_EACH)
def test_with_the_adaptations_it_is_as_they_say(name: str) -> None:
    model = build(name)
    assert attrs.evolve(check(name, model), banks="") == by_caches(model)


@pytest.mark.parametrize("name", FULL_SIZE_FAULTY)
@pytest.mark.usefixtures("no_adaptations")
@pytest.mark.long(but=("AFM-3B", "SantaCoder-1B"))
def test_a_tiny_model_of_a_published_config_shows_it(name: str) -> None:
    """The published model is never computed, and not even its memory is taken."""
    model = tiny.empty(FULL_SIZE[name])
    found = Check(model, FULL_SIZE[name], 512, PLAIN, "fast").of_tiny(by_caches(model))
    assert found.batch


@pytest.mark.usefixtures("no_adaptations")
@pytest.mark.parametrize("name", ["phi3small", "plamo3"])
def test_a_model_whose_answer_follows_from_its_chunks_is_refused(name: str) -> None:
    """mlx-lm adds phi3small's boolean mask to the scores, so that a prompt's tokens see those after
    them. plamo3's see one token more than its caches keep, beyond the window."""
    with pytest.raises(WrongAloneError, match="in chunks than for the whole prompt"):
        check(name, build(name))


@pytest.mark.parametrize("adapts", [True, False])
def test_what_a_model_does_beyond_its_first_context_is_seen(
    *, adapts: bool, request: pytest.FixtureRequest
) -> None:
    """mlx-vlm's LongRoPE chooses its factors by the last position of a pass."""
    rope = {
        "type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [3.0 + index for index in range(8)],
        "original_max_position_embeddings": 4096,
    }
    if not adapts:
        request.getfixturevalue("no_adaptations")
    model, config = vlm_playing.build("k2_horizon", rope_scaling=rope)
    if adapts:
        assert vlm_playing.check(model, config, EXACT) == Capabilities()
    else:
        with pytest.raises(WrongAloneError, match="in chunks than for the whole prompt"):
            vlm_playing.check(model, config, EXACT)


@pytest.mark.parametrize("name", sorted({*CONFIGS} - {"phi3small"}) if LONG else SOME)
@pytest.mark.long(but=("llama4", "qwen3_next", "deepseek_v2"))
def test_what_is_right_with_adaptations_stays_on(name: str) -> None:
    model = build(name)
    assert attrs.evolve(check(name, model), banks="") == by_caches(model)
