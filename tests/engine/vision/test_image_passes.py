"""Logits of prompts with images are those of mlx-vlm's whole prompt, wherever the prompt is cut."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import pytest

from tests.engine.vision.families import (
    FAMILIES,
    GEMMA,
    Models,
    Numbers,
    VisionModel,
    picture,
    text,
)
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.kv.row_images import RowImages
from trouper.engine.kv.rows import rows_for
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.passes.media_pass import EncodedImage
from trouper.engine.platform import device
from trouper.engine.vision.encoder import Encoding
from trouper.engine.vision.tower import Tower, patches_at_once
from trouper.protocol.media import MediaSpan, Pixels
from trouper.protocol.plans import RowId

PICTURES = picture(16, 24, 1), picture(24, 16, 2)
MIXED = (text(5, 1), PICTURES[0], text(4, 2), PICTURES[1], text(6, 3))
CLOSE = 1e-4
AUDIBLE = 0.05
every_family = pytest.mark.parametrize("name", FAMILIES)


@attrs.frozen(eq=False)
class Case:
    """A prompt with two images, on rows of its own."""

    rows: SlotRows
    tokens: list[int]
    spans: tuple[MediaSpan, ...]
    images: Sequence[EncodedImage]
    expected: Numbers

    def logits(self, cuts: Sequence[int] = ()) -> Numbers:
        """(tokens, vocabulary), computed in pieces."""
        row, logits = RowId(0), []
        self.rows.open(row, len(self.tokens))
        self.rows.images.open(row, self.spans)
        ends = [*cuts, len(self.tokens)]
        for start, stop in zip([0, *cuts], ends, strict=True):
            self.rows.begin_step()
            touched = zip(self.spans, self.images, strict=True)
            shown = [image for span, image in touched if span.start < stop and start < span.end]
            self.rows.images.show(row, start, stop, shown)
            logits.append(np.array(self.rows.score(row, self.tokens[start:stop])))
        self.rows.drop([row])
        return np.concatenate(logits)

    def error(self, cuts: Sequence[int] = ()) -> float:
        return float(np.abs(self.logits(cuts) - self.expected).max())


def encode(
    tower: Tower, pixels: Pixels, pieces: int = 1, piece_patches: int | None = None
) -> EncodedImage:
    """`piece_patches`: None: of the device."""
    size = patches_at_once() if piece_patches is None else piece_patches
    encoding = Encoding(tower, pixels, size)
    while (image := encoding.advance(pieces)) is None:
        pass
    return image


def case_of(model: VisionModel) -> Case:
    tokens, spans, images = model.prompt(MIXED)
    rows, _ = rows_for(model.model, PLAIN)
    assert isinstance(rows, SlotRows)
    vectors = [encode(model.tower, image) for image in images]
    return Case(rows, tokens, spans, vectors, model.logits(tokens, images))


@every_family
def test_a_prompt_may_be_cut_at_every_token_also_inside_images(
    vision_model: Models, name: str
) -> None:
    case = case_of(vision_model(name))
    assert case.error() < CLOSE
    for cut in range(1, len(case.tokens)):
        assert case.error([cut]) < CLOSE, cut
    assert case.error(range(1, len(case.tokens))) < CLOSE


@every_family
def test_swapped_images_are_heard(vision_model: Models, name: str) -> None:
    case = case_of(vision_model(name))
    first, second = case.images
    assert first.embeddings.shape == second.embeddings.shape
    assert attrs.evolve(case, images=(second, first)).error() > AUDIBLE


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
def test_an_ignored_delta_is_heard(
    vision_model: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(vision_model(name))
    behind = case.spans[-1].end + 1
    assert case.error([behind]) < CLOSE
    monkeypatch.setattr(RowImages, "deltas", lambda _self, _rows, _lengths: None)
    assert case.error([behind]) > AUDIBLE


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe"])
def test_missing_deepstack_is_heard(vision_model: Models, name: str) -> None:
    case = case_of(vision_model(name))
    assert case.images[0].deepstack
    dropped = [EncodedImage(image.embeddings) for image in case.images]
    assert attrs.evolve(case, images=dropped).error() > AUDIBLE


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_rows_and_columns_that_change_places_are_heard(vision_model: Models, name: str) -> None:
    case = case_of(vision_model(name))
    turned = []
    for span in case.spans:
        frames, rows, columns = span.shape.grid
        shape = attrs.evolve(span.shape, grid=(frames, columns, rows))
        turned.append(attrs.evolve(span, shape=shape))
    assert attrs.evolve(case, spans=tuple(turned)).error() > AUDIBLE


@pytest.mark.parametrize("name", [*FAMILIES, *GEMMA])
@pytest.mark.parametrize("patches", [0, 3, 5])
def test_slices_do_not_change_the_vectors(vision_model: Models, name: str, patches: int) -> None:
    """A piece may be some patches of a layer, of whatever number. Only a CPU's pieces are."""
    if patches and not device.is_cpu():
        pytest.skip("a GPU runs whole layers")
    model = vision_model(name)
    _, _, [pixels] = model.prompt([PICTURES[0]])
    at_once = encode(model.tower, pixels, pieces=999, piece_patches=patches)
    sliced = encode(model.tower, pixels, pieces=1, piece_patches=patches)
    if patches:
        layers = encode(model.tower, pixels, piece_patches=0)
        for one, other in zip(at_once.arrays(), layers.arrays(), strict=True):
            np.testing.assert_allclose(np.array(one), np.array(other), atol=CLOSE)
    for one, other in zip(at_once.arrays(), sliced.arrays(), strict=True):
        assert np.array_equal(np.array(one), np.array(other))
