"""Logits and positions are those of transformers with torch, an independent reference, for
checkpoints with published names of weights (`tests/engine/vision_references.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from tests.engine.vision.families import Numbers, text_model
from tests.engine.vision.test_image_passes import Case, encode
from tests.engine.vision_references import (
    BREAK,
    CONFIGS,
    END,
    IMAGE,
    PREPROCESSORS,
    PROMPTS,
    START,
    images_of,
    picture,
    read_references,
    save_checkpoint,
)
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.kv.row_images import positions_of
from trouper.engine.kv.rows import rows_for
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.loading.image_loading import connect
from trouper.engine.vision.layouts import Layout, layout_of
from trouper.engine.vision.tower import Tower
from trouper.engine.vision.towers import load_tower
from trouper.protocol.media import ImageSize, MediaSpan, Pixels

CLOSE = 1e-4
TOKEN_IDS = {"<|image_pad|>": IMAGE, "[IMG]": IMAGE, "[IMG_BREAK]": BREAK, "[IMG_END]": END}
every_model = pytest.mark.parametrize("name", CONFIGS)


@attrs.frozen(eq=False)
class Loaded:
    rows: SlotRows
    tower: Tower
    layout: Layout


@cache
def loaded(name: str, directory: Path) -> Loaded:
    save_checkpoint(name, directory)
    model, config = text_model(directory)
    layout = layout_of(config, PREPROCESSORS[name], TOKEN_IDS)
    tower = load_tower(directory, config, layout)
    connect(model, tower, config)
    rows, _ = rows_for(model, PLAIN)
    assert isinstance(rows, SlotRows)
    return Loaded(rows, tower, layout)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


def spans_of(
    name: str, layout: Layout, prompt: str, tokens: Sequence[int]
) -> tuple[MediaSpan, ...]:
    """Where a run of the layout's tokens begins in the reference's prompt."""
    spans, start = list[MediaSpan](), 0
    for number in images_of(prompt):
        height, width, _ = picture(name, number).shape
        shape = layout.shape(ImageSize(width, height, "png"), "auto", 4096)
        start = tokens.index(START if name.startswith("gemma") else IMAGE, start)
        span = layout.span(start, shape, bytes([number]) * 32)
        assert list(span.tokens) == list(tokens[start : span.end])
        spans.append(span)
        start = span.end
    return tuple(spans)


def pixels_of(name: str, number: int) -> Pixels:
    height, width, _ = picture(name, number).shape
    return Pixels(height, width, picture(name, number).tobytes())


def case_of(name: str, prompt: str, directory: Path) -> tuple[Case, dict[str, Any]]:
    model, reference = loaded(name, directory / name), read_references()[name]["prompts"][prompt]
    tokens = reference["tokens"]
    spans = spans_of(name, model.layout, prompt, tokens)
    vectors = [encode(model.tower, pixels_of(name, number)) for number in images_of(prompt)]
    return Case(model.rows, tokens, spans, vectors, np.zeros((0, 0), np.float32)), reference


def error(logits: Numbers, reference: dict[str, Any]) -> float:
    """Largest difference of a logit, or of a token's sum of exponentials."""
    wide = logits.astype(np.float64)
    sums = np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1)) + wide.max(-1)
    differences = [np.abs(sums - np.array(reference["logsumexp"])).max()]
    differences += [
        np.abs(logits[int(index)] - np.array(numbers)).max()
        for index, numbers in reference["logits"].items()
    ]
    return float(max(differences))


def ends_of_chunks(case: Case) -> list[int]:
    """Where a chunk may end: anywhere, but not inside an image that attends to its end."""
    atomic = [span for span in case.spans if span.atomic]
    inside = {at for span in atomic for at in range(span.start + 1, span.end)}
    return [cut for cut in range(1, len(case.tokens)) if cut not in inside]


@every_model
@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits(name: str, prompt: str, directory: Path) -> None:
    case, reference = case_of(name, prompt, directory)
    assert error(case.logits(), reference) < CLOSE


@every_model
def test_logits_of_a_prompt_that_is_cut_at_any_token(name: str, directory: Path) -> None:
    case, reference = case_of(name, "two images", directory)
    for cut in ends_of_chunks(case):
        assert error(case.logits([cut]), reference) < CLOSE, cut


@every_model
def test_swapped_images_are_not_close(name: str, directory: Path) -> None:
    case, _ = case_of(name, "two images", directory)
    _, swapped = case_of(name, "two images, swapped", directory)
    assert error(case.logits(), swapped) > 100 * CLOSE


@every_model
@pytest.mark.parametrize("prompt", PROMPTS)
def test_positions(name: str, prompt: str, directory: Path) -> None:
    case, reference = case_of(name, prompt, directory)
    if not name.startswith("qwen"):
        assert all(span.extent == len(span.tokens) for span in case.spans)
        return
    positions = positions_of(case.spans, 0, len(case.tokens))
    assert positions.tolist() == reference["positions"]
    behind = positions_of(case.spans, len(case.tokens), len(case.tokens) + 1)
    assert (behind == len(case.tokens) + reference["delta"]).all()
