"""Images whose tokens attend to each other: what is made wrong on purpose is far from the logits of
transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from tests.engine.vision.reference_cases import CLOSE, case_of, error, loaded, pixels_of
from tests.engine.vision.test_image_passes import encode
from tests.engine.vision.test_vision_references import directory
from tests.engine.vision_references import images_of
from trouper.engine.kv.row_images import RowImages
from trouper.engine.passes.media_pass import MediaPass
from trouper.protocol.plans import RowId

__all__ = ["directory"]
PROMPT = "two images"
ATOMIC = ("gemma3", "gemma4", "gemma4_unified")
every_atomic = pytest.mark.parametrize("name", ATOMIC)
HEARD = 100 * CLOSE


@every_atomic
def test_a_causal_mask_is_heard(
    name: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, reference = case_of(name, PROMPT, directory)
    monkeypatch.setattr(RowImages, "reach", lambda *_: None)
    assert error(case.logits(), reference) > HEARD


@pytest.mark.parametrize(("name", "right"), [("gemma3", True), ("gemma4", False)])
def test_another_mask_of_full_layers_is_heard(
    name: str, right: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, reference = case_of(name, PROMPT, directory)
    assert case.rows.images.reach_in_full_layers == right
    monkeypatch.setattr(case.rows.images, "reach_in_full_layers", not right)
    assert error(case.logits(), reference) > HEARD


@every_atomic
def test_an_image_that_is_split_is_heard(
    name: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, reference = case_of(name, PROMPT, directory)
    cut = case.spans[0].start + 5
    with pytest.raises(AssertionError, match="a chunk ends inside an image"):
        case.logits([cut])
    case.rows.drop([RowId(0)])

    def cut_off(images: RowImages, row: RowId, start: int, stop: int) -> Iterator[tuple[int, int]]:
        for span in images._touched(row, start, stop):
            yield span.start + 1, min(span.end - 1, stop)

    monkeypatch.setattr(RowImages, "_atomic_runs", cut_off)
    assert error(case.logits([cut]), reference) > HEARD


@pytest.mark.parametrize("name", [*ATOMIC, "gemma4_small"])
def test_vectors_that_are_not_divided_are_heard(
    name: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, reference = case_of(name, PROMPT, directory)
    tower = loaded(name, directory / name).tower
    assert tower.embedding_scale == 8.0
    monkeypatch.setattr(tower, "embedding_scale", 1.0)
    vectors = [encode(tower, pixels_of(name, number)) for number in images_of(PROMPT)]
    assert error(attrs.evolve(case, images=vectors).logits(), reference) > HEARD


def test_the_image_token_among_per_layer_inputs_is_heard(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, reference = case_of("gemma4_small", PROMPT, directory)
    assert error(case.logits(), reference) < CLOSE
    monkeypatch.setattr(MediaPass, "put_token", lambda _self, tokens, _token: tokens)
    assert error(case.logits(), reference) > HEARD


def test_a_small_gemma_4_may_be_cut_inside_an_image(directory: Path) -> None:
    case, reference = case_of("gemma4_small", PROMPT, directory)
    span = case.spans[0]
    assert not span.atomic
    assert error(case.logits([span.start + 5, span.start + 6]), reference) < CLOSE
