"""Logits and positions are those of transformers with torch, an independent reference, for
checkpoints with published names of weights (`tests/engine/vision_references.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.vision.reference_cases import CLOSE, case_of, ends_of_chunks, error
from tests.engine.vision_models import CONFIGS
from tests.engine.vision_references import PROMPTS
from trouper.engine.kv.row_images import positions_of

every_model = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


@every_model
@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits(name: str, prompt: str, directory: Path) -> None:
    case, reference = case_of(name, prompt, directory)
    assert error(case.logits(), reference) < CLOSE


@every_model
def test_logits_of_a_prompt_that_is_cut_at_any_token(name: str, directory: Path) -> None:
    case, reference = case_of(name, "two images", directory)
    ends = ends_of_chunks(case)
    for cut in ends:
        assert error(case.logits([cut]), reference) < CLOSE, cut
    assert error(case.logits(ends), reference) < CLOSE


@every_model
def test_swapped_images_are_not_close(name: str, directory: Path) -> None:
    case, _ = case_of(name, "two images", directory)
    _, swapped = case_of(name, "two images, swapped", directory)
    assert error(case.logits(), swapped) > 100 * CLOSE


@every_model
@pytest.mark.parametrize("prompt", PROMPTS)
def test_positions(name: str, prompt: str, directory: Path) -> None:
    case, reference = case_of(name, prompt, directory)
    if not name.startswith(("qwen", "glm")):
        assert all(span.extent == len(span.tokens) for span in case.spans)
        return
    positions = positions_of(case.spans, 0, len(case.tokens))
    expected = reference["positions"] or [list(range(len(case.tokens)))] * 3
    assert positions.tolist() == expected
    behind = positions_of(case.spans, len(case.tokens), len(case.tokens) + 1)
    assert (behind == len(case.tokens) + reference["delta"]).all()
