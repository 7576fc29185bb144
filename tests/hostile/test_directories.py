"""Hostile directories and adapters are refused by name, before anything of them is computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.families import save
from tests.hostile.directories import RECIPES, Case, build, remove
from trouper.engine.loading import tokenizer_trial
from trouper.engine.loading.adapter_files import find_adapter
from trouper.engine.loading.layer_patterns import LayerPatterns
from trouper.engine.loading.model_loading import measured
from trouper.engine.loading.tokenizer import load
from trouper.protocol.problems import LONGEST_LINE, ModelUnusable
from trouper.protocol.settings import Settings
from trouper.storage.model_scan import ModelScan

EARLY = (
    *("config_", "weights_", "index_", "generation_"),
    *("tokenizer_fifo", "tokenizer_device", "template_fifo"),
)
"""Cases of which nothing but configs and headers is read."""


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Case]]:
    save("llama", tiny := tmp_path / "tiny")
    (tiny / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    yield build(tmp_path / "made", tiny, *request.param)
    remove(tmp_path / "made")


def complaint(case: Case) -> str:
    """The error of what looks at configs and headers alone; "" if that finds nothing."""
    try:
        if case.kind == "adapter":
            find_adapter("it", str(case.path))
        else:
            measured(Settings(model=str(case.path)))
    except ModelUnusable as unusable:
        return str(unusable)
    return ""


@pytest.mark.parametrize("made", [(*EARLY, "adapter_", "gguf_")], indirect=True)
def test_files_are_refused_by_name(made: list[Case]) -> None:
    said = {case.name: complaint(case) for case in made}
    for case in made:
        text = said[case.name]
        assert text.isprintable(), case.name
        assert len(text) <= LONGEST_LINE + 300, case.name
        assert not text or all(word in text for word in case.words), text
    found = {name for name, text in said.items() if text}
    assert found >= {"weights_fifo", "weights_overlapping", "config_deep", "config_layers_billion"}
    assert found >= {"adapter_alpha_backtracks", "adapter_header_of_2_63", "gguf_cut", "index_deep"}


@pytest.mark.parametrize("made", [EARLY], indirect=True)
def test_a_scan_lists_them_as_damaged_in_one_line_each(made: list[Case]) -> None:
    scan = ModelScan([str(made[0].path.parent)], answer_s=60)
    for files in scan.models():
        for text in (files.name, files.problem, files.architecture, files.quantization):
            assert text.isprintable() and len(text) <= LONGEST_LINE + 4


@pytest.mark.parametrize(
    "made",
    [("template_power", "template_multiplies", "tokenizer_splits", "template_escapes")],
    indirect=True,
)
def test_templates_and_tokenizers_without_end_are_refused(
    made: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_trial, "CPU_S", 1)
    for case in made:
        if case.words:
            with pytest.raises(ModelUnusable) as refused:
                load(case.path)
            assert all(word in str(refused.value) for word in (case.path.name, *case.words))
        else:
            summary = load(case.path).template.summary
            assert summary is not None and summary.isprintable()


def test_a_tokenizer_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Path] = []

    def fault(directory: Path) -> str:
        tried.append(directory)
        return ""

    monkeypatch.setattr(tokenizer_trial, "_fault", fault)
    monkeypatch.setattr(tokenizer_trial, "default_cache_dir", lambda: tmp_path / "cache")
    (tmp_path / "chat_template.jinja").write_text("a")
    tokenizer_trial.try_tokenizer(tmp_path)
    tokenizer_trial.try_tokenizer(tmp_path)
    assert len(tried) == 1
    (tmp_path / "chat_template.jinja").write_text("b")
    tokenizer_trial.try_tokenizer(tmp_path)
    assert len(tried) == 2


LAYER = "model.layers.12.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("q_proj", True),
        ("proj", False),
        ("self_attn.q_proj", True),
        ("model.layers.12.self_attn.q_proj", True),
        ("^model.layers.12.self_attn.q_proj", True),
        ("^self_attn.q_proj", False),
        (r"layers\.\d+\.self_attn\.q_proj$", True),
        (r"layers.1[0-5].self_attn.[qk]_proj", True),
        (r"layers.1[3-5].self_attn.[qk]_proj", False),
        (r"\d+.q_proj", False),
    ],
)
def test_patterns_of_adapters_match_the_end_of_a_name(pattern: str, matches: bool) -> None:
    assert LayerPatterns({pattern: 3}).value_for(LAYER, 1) == (3 if matches else 1)


def test_the_first_pattern_that_matches_decides() -> None:
    patterns = LayerPatterns({"k_proj": 2, r"self_attn.[qk]_proj": 3, "q_proj": 4})
    assert (patterns.value_for(LAYER, 1), patterns.value_for("x.k_proj", 1)) == (3, 2)


@pytest.mark.parametrize(
    "pattern", ["(a+)+!", "a*a*!", "(q|k)_proj", ".*q_proj", "a{9}", r"\w+\w+", r"(a)\1", "[^a]"]
)
def test_patterns_that_may_match_in_several_ways_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="may match in several ways"):
        LayerPatterns({pattern: 3})


def test_all_kinds_are_there() -> None:
    assert len(RECIPES) == len({recipe.name for recipe in RECIPES}) >= 40
