"""Each text module of mlx-vlm that mlx-lm does not have: what the self-check leaves of it is right,
and stands on the page. `just zoo` plays them all."""

from __future__ import annotations

import pytest

from tests.arithmetic import full_float32
from tests.family_configs import VOCABULARY
from tests.zoo.mixes import BOUND
from tests.zoo.table import PAGE
from tests.zoo.vlm_catalogue import DATA, NO_LANGUAGE, modules
from tests.zoo.vlm_playing import Played, build, look_at
from tests.zoo.vlm_table import ALL, HEADING, REFUSED, group_of
from trouper.engine.architectures import vlm_models
from trouper.engine.kv.quantized_kv import KvFormat
from trouper.engine.passes.pass_shapes import EXACT
from trouper.engine.self_check import tiny
from trouper.engine.self_check.checking import Check
from trouper.protocol.capabilities import SelfCheckMode


def line_of(title: str) -> str:
    """The names of a group on the page."""
    section = PAGE.read_text("utf-8").split(HEADING)[1]
    [line] = [line for line in section.splitlines() if line.startswith(f"| {title} |")]
    return line


@full_float32
@pytest.mark.parametrize("name", modules())
@pytest.mark.long(
    but=(
        "cohere2_moe",
        "glm_ocr",
        "longcat_flash_sparse",
        "minicpmv4_6",
        "qwen3_omni_moe",
        "nemotron_h_nano_omni",
        "limite",
        "unlimited_ocr",
        "z1t",
        "florence2",
        "llada2_moe",
    )
)
def test_what_the_self_check_leaves_is_right(name: str) -> None:
    played = look_at(name)
    assert played.faults == ()
    assert bool(played.errors) != bool(played.refused), "it runs, or is refused with a reason"
    assert max(played.errors, default=0.0) <= BOUND
    assert f"`{name}`" in line_of(group_of(played)), "`just zoo` writes the page"
    assert played.reason in line_of(group_of(played))


def test_each_module_stands_on_the_page_once() -> None:
    section = PAGE.read_text("utf-8").split(HEADING)[1].split("\n## ")[0]
    assert {name: section.count(f"`{name}`") for name in modules()} == dict.fromkeys(modules(), 1)


def test_data_is_of_modules_that_there_are() -> None:
    assert DATA.keys() <= {*modules()}
    assert {*NO_LANGUAGE} <= vlm_models.names()


def test_a_module_that_is_batched_and_one_that_is_refused_have_other_groups() -> None:
    assert group_of(Played("one")) == ALL
    assert group_of(Played("one", refused="it fails")) == REFUSED


@pytest.mark.parametrize("name", ["idefics3", "glm_ocr", "llava_next"])
def test_a_model_that_needs_its_encoder_has_a_tiny_form_for_the_self_check(name: str) -> None:
    """Else each start plays every scenario with the real weights."""
    model, config = build(name)
    assert next(tiny.configs(model, config), None) is not None


@pytest.mark.parametrize("mode", ["fast", "full"])
def test_rows_that_step_one_by_one_are_checked_without_quantized_kv(mode: SelfCheckMode) -> None:
    """Their KV is the model's own; in slots ZAYA1-VL's code fails."""
    checked = Check(*build("zaya1_vl"), VOCABULARY, KvFormat(8, 32), mode, shapes=EXACT).run()
    assert not checked.capabilities.allows("batch")
