"""Cases of tests from the references of transformers (`tests/engine/vision_references.py`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from mlx import nn

from tests.engine.vision.families import Numbers, text_model
from tests.engine.vision.test_image_passes import Case, encode
from tests.engine.vision.test_image_rows import Prompt
from tests.engine.vision_models import PREPROCESSORS, TOKEN_IDS
from tests.engine.vision_references import (
    images_of,
    overview,
    picture,
    read_references,
    save_checkpoint,
    size_of,
)
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.kv.rows import rows_for
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.loading.image_loading import connect
from trouper.engine.vision.layouts import Layout, layout_of
from trouper.engine.vision.tower import Tower
from trouper.engine.vision.towers import load_tower
from trouper.protocol.media import ImageSize, MediaSpan, Pixels

CLOSE = 1e-4


@attrs.define(eq=False)
class Loaded:
    name: str
    model: nn.Module
    tower: Tower
    layout: Layout


@cache
def loaded(name: str, directory: Path) -> Loaded:
    save_checkpoint(name, directory)
    model, config = text_model(directory)
    layout = layout_of(config, PREPROCESSORS[name], TOKEN_IDS[name])
    tower = load_tower(directory, config, layout)
    connect(model, tower, config)
    return Loaded(name, model, tower, layout)


def pixels_of(name: str, number: int) -> Pixels:
    height, width = size_of(name, number)
    small = overview(name, number)
    smaller = None
    if small is not None:
        smaller = Pixels(small.shape[0], small.shape[1], small.tobytes())
    return Pixels(height, width, picture(name, number).tobytes(), smaller)


def spans_of(model: Loaded, prompt: str, tokens: list[int]) -> tuple[MediaSpan, ...]:
    """Where a run of the layout's tokens begins in the reference's prompt."""
    spans, start = list[MediaSpan](), 0
    for number in images_of(prompt):
        height, width = size_of(model.name, number)
        shape = model.layout.shape(ImageSize(width, height, "png"), "auto", 4096)
        assert shape.resized == (height, width)
        small = overview(model.name, number)
        assert shape.overview == (None if small is None else small.shape[:2])
        first = model.layout.span(0, shape, b"").tokens[0]
        start = tokens.index(first, start)
        span = model.layout.span(start, shape, bytes([number]) * 32)
        assert list(span.tokens) == tokens[start : span.end]
        spans.append(span)
        start = span.end
    return tuple(spans)


def prompt_of(model: Loaded, prompt: str) -> Prompt:
    """Without an answer where the references have none."""
    reference = read_references(model.name)["prompts"][prompt]
    tokens = reference["tokens"]
    images = [pixels_of(model.name, number) for number in images_of(prompt)]
    return Prompt(tokens, spans_of(model, prompt, tokens), images, reference.get("answer", []))


def case_of(name: str, prompt: str, directory: Path) -> tuple[Case, dict[str, Any]]:
    model = loaded(name, directory / name)
    made = prompt_of(model, prompt)
    rows, _ = rows_for(model.model, PLAIN)
    assert isinstance(rows, SlotRows)
    vectors = [encode(model.tower, pixels) for pixels in made.images]
    case = Case(rows, made.tokens, made.spans, vectors, np.zeros((0, 0), np.float32))
    return case, read_references(name)["prompts"][prompt]


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
