"""Further families: logits, positions and answers are those of transformers with torch
(`tests/engine/family_references.py`), alone, in company, wherever the prompt is cut, restored at
any token, and with drafts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.engine.family_references import (
    CONFIGS,
    IMAGE,
    PREPROCESSORS,
    TOKEN_IDS,
    overview,
    picture,
    read_references,
    save_checkpoint,
    size_of,
    span_tokens,
)
from tests.engine.vision.families import TEMPLATE, Numbers, text_model
from tests.engine.vision.test_image_passes import Case, encode
from tests.engine.vision.test_image_rows import (
    Prompt,
    answer_after_warming_up,
    draft_behind_images,
    restore_at_every_token,
    share_passes,
)
from tests.engine.vision.test_vision_references import error
from tests.engine.vision_references import PROMPTS, VOCABULARY, images_of
from tests.families import write_json
from tests.image_files import encoded
from trouper.actors.runtime.image_prompts import insert_images
from trouper.engine.adaptations.image_passes import MropeSections
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.kv.row_images import positions_of
from trouper.engine.kv.rows import rows_for
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.loading.image_loading import connect
from trouper.engine.loading.model_loading import load
from trouper.engine.platform import device
from trouper.engine.vision.bounded_attention import attend
from trouper.engine.vision.encoder import Encoding
from trouper.engine.vision.grouped_attention import GroupedHeads
from trouper.engine.vision.layouts import Layout, layout_of
from trouper.engine.vision.siglip_tower import SiglipTower
from trouper.engine.vision.step_memory import encoder_step_bytes
from trouper.engine.vision.tower import Tower, patches_at_once
from trouper.engine.vision.towers import load_tower
from trouper.protocol.media import ImageSize, ImageSource, MediaSpan, Pixels
from trouper.protocol.requests import ChatPrompt
from trouper.protocol.settings import Settings
from trouper.storage.model_files import takes_images

CLOSE = 1e-4
MARKERS = {
    "qwen2_vl": "<|image_pad|>",
    "qwen2_5_vl": "<|image_pad|>",
    "kimi_vl": "<|media_pad|>",
    "kimi_k25": "<|media_pad|>",
    "llama4": "<|image|>",
}
every_family = pytest.mark.parametrize("name", CONFIGS)


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


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def pixels_of(name: str, number: int) -> Pixels:
    height, width = size_of(name, number)
    small = overview(name, number)
    smaller = None
    if small is not None:
        smaller = Pixels(small.shape[0], small.shape[1], small.tobytes())
    return Pixels(height, width, picture(name, number).tobytes(), smaller)


def spans_of(model: Loaded, prompt: str, tokens: list[int]) -> tuple[MediaSpan, ...]:
    spans, start = list[MediaSpan](), 0
    for number in images_of(prompt):
        height, width = size_of(model.name, number)
        shape = model.layout.shape(ImageSize(width, height, "png"), "auto", 4096)
        assert shape.resized == (height, width)
        small = overview(model.name, number)
        assert shape.overview == (None if small is None else small.shape[:2])
        first = span_tokens(model.name, number)[0]
        start = tokens.index(first, start) if first != IMAGE else tokens.index(IMAGE, start)
        span = model.layout.span(start, shape, bytes([number]) * 32)
        assert list(span.tokens) == tokens[start : span.end]
        spans.append(span)
        start = span.end
    return tuple(spans)


def prompt_of(model: Loaded, prompt: str) -> Prompt:
    reference = read_references()[model.name]["prompts"][prompt]
    tokens = reference["tokens"]
    images = [pixels_of(model.name, number) for number in images_of(prompt)]
    return Prompt(tokens, spans_of(model, prompt, tokens), images, reference["answer"])


def case_of(name: str, prompt: str, directory: Path) -> tuple[Case, dict[str, Any]]:
    model = loaded(name, directory / name)
    made = prompt_of(model, prompt)
    rows, _ = rows_for(model.model, PLAIN)
    assert isinstance(rows, SlotRows)
    vectors = [encode(model.tower, pixels) for pixels in made.images]
    case = Case(rows, made.tokens, made.spans, vectors, np.zeros((0, 0), np.float32))
    return case, read_references()[name]["prompts"][prompt]


@every_family
@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits(name: str, prompt: str, directory: Path) -> None:
    case, reference = case_of(name, prompt, directory)
    assert error(case.logits(), reference) < CLOSE


@every_family
def test_logits_of_a_prompt_that_is_cut_at_any_token(name: str, directory: Path) -> None:
    case, reference = case_of(name, "two images", directory)
    for cut in range(1, len(case.tokens)):
        assert error(case.logits([cut]), reference) < CLOSE, cut
    assert error(case.logits(range(1, len(case.tokens))), reference) < CLOSE


@every_family
def test_swapped_images_are_not_close(name: str, directory: Path) -> None:
    case, _ = case_of(name, "two images", directory)
    _, swapped = case_of(name, "two images, swapped", directory)
    assert error(case.logits(), swapped) > 100 * CLOSE


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_positions(name: str, prompt: str, directory: Path) -> None:
    case, reference = case_of(name, prompt, directory)
    positions = positions_of(case.spans, 0, len(case.tokens))
    expected = reference["positions"] or [list(range(len(case.tokens)))] * 3
    assert positions.tolist() == expected
    behind = positions_of(case.spans, len(case.tokens), len(case.tokens) + 1)
    assert (behind == len(case.tokens) + reference["delta"]).all()


@pytest.mark.long(but=("qwen2_5_vl", "smolvlm", "lfm2_vl"))
@every_family
def test_rows_with_images_and_text_share_passes(name: str, directory: Path) -> None:
    model = loaded(name, directory / name)
    names = ("two images", "three images", "an image first", "no image")
    share_passes(model, [prompt_of(model, prompt) for prompt in names])


@pytest.mark.long(but=("qwen2_5_vl", "smolvlm", "lfm2_vl"))
@every_family
def test_a_row_is_restored_at_every_token(name: str, directory: Path) -> None:
    model = loaded(name, directory / name)
    restore_at_every_token(model, prompt_of(model, "two images"), live=name != "lfm2_vl")


@every_family
def test_drafts_behind_an_image_change_nothing(name: str, directory: Path) -> None:
    model = loaded(name, directory / name)
    prompts = [prompt_of(model, prompt) for prompt in ("two images", "an image first")]
    draft_behind_images(model, prompts, 256)


@every_family
def test_an_engine_that_was_warmed_up_with_an_image_answers_as_ever(
    name: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(name, directory / name)
    prompt = prompt_of(model, "two images")
    answer_after_warming_up(model, model.layout, prompt, monkeypatch, 256)


# -- as a server loads them ----------------------------------------------------------------------


def save_tokenizer(name: str, directory: Path) -> None:
    """ASCII, the family's marks, and two newlines as one token."""
    ascii_pieces = {character: ord(character) for character in map(chr, range(33, 127))}
    marks = {**TOKEN_IDS[name], "<|end|>": 199}
    vocabulary = {f"unused{index}": index for index in range(VOCABULARY)}
    vocabulary |= {"Ġ": 32, "Ċ": 10, **ascii_pieces}
    taken = {*vocabulary.values()} & {*marks.values(), 32, 10, *ascii_pieces.values()}
    kept = {piece: at for piece, at in vocabulary.items() if at not in taken or len(piece) == 1}
    merges = [("Ċ", "Ċ")] if "ĊĊ" in marks else []
    tokenizer = Tokenizer(models.BPE(vocab={**kept, **marks}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(mark, special=True, normalized=False) for mark in marks if "<" in mark]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    marker = MARKERS.get(name, "<image>")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": TEMPLATE.format(marker=marker),
    }
    write_json(directory / "tokenizer_config.json", config)


@every_family
def test_a_server_loads_the_encoder_and_puts_images_into_prompts(
    name: str, directory: Path, tmp_path: Path
) -> None:
    save_tokenizer(name, save_checkpoint(name, tmp_path))
    served = load(Settings(model=str(tmp_path), self_check="fast"), lambda _line: None)
    assert served.card.no_images == ""
    assert served.images.off == {}
    assert served.card.images == attrs.evolve(
        loaded(name, directory / name).layout, piece_patches=patches_at_once()
    )
    assert takes_images(CONFIGS[name])
    assert isinstance(served.images.tower, nn.Module)
    vectors, expected = (
        encode(tower, pixels_of(name, 0)).embeddings
        for tower in (served.images.tower, loaded(name, directory / name).tower)
    )
    assert np.array_equal(np.array(vectors), np.array(expected))
    height, width = size_of(name, 0)
    source = ImageSource(encoded(Image.new("RGB", (width, height)), "png"), "messages.0.content.0")
    content = ({"type": "image"}, {"type": "text", "text": "what is it"})
    prompt = ChatPrompt(({"role": "user", "content": content},), images=(source,))
    tokenizer = served.tokenizer
    tokens = tuple(tokenizer.encode_chat(list(prompt.messages)))
    expanded, [image] = insert_images(tokens, prompt, served.card, tokenizer, Settings())
    assert list(image.span.tokens) == span_tokens(name, 0)
    assert expanded[image.span.start : image.span.end] == image.span.tokens


def test_smolvlms_config_may_leave_defaults_out(tmp_path: Path) -> None:
    config = CONFIGS["smolvlm"]
    vision = {key: config["vision_config"][key] for key in ("image_size", "patch_size")}
    layout = layout_of(config, PREPROCESSORS["smolvlm"], TOKEN_IDS["smolvlm"])
    tower = SiglipTower({**config, "vision_config": vision}, layout.patches, 16)
    assert (tower.num_layers, tower.layers[0].mlp.fc1.weight.shape) == (12, (3072, 1152))
    assert encoder_step_bytes(vision, layout, 100, 4) > 2**26


# -- what must be heard --------------------------------------------------------------------------


def vectors_of(name: str, directory: Path, piece_patches: int = 0) -> Numbers:
    tower = loaded(name, directory / name).tower
    image = encode(tower, pixels_of(name, 0), piece_patches=piece_patches)
    return np.array(image.embeddings)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "idefics3", "lfm2_vl", "llama4"])
def test_patches_that_attend_to_other_groups_are_heard(
    name: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = vectors_of(name, directory)

    def to_all(heads: GroupedHeads, patches: slice) -> mx.array:
        return attend(heads.queries, heads.keys, heads.values, patches)

    module = {"qwen2_5_vl": "qwen2_tower", "llama4": "llama_tower"}.get(name, "siglip_tower")
    monkeypatch.setattr(f"trouper.engine.vision.{module}.attend_in_groups", to_all)
    assert np.abs(vectors_of(name, directory) - expected).max() > 100 * CLOSE


@every_family
@pytest.mark.parametrize("patches", [3, 5, 16])
def test_slices_do_not_change_the_vectors(name: str, patches: int, directory: Path) -> None:
    """A piece may begin within a group."""
    if not device.is_cpu():
        pytest.skip("a GPU runs whole layers")
    expected = vectors_of(name, directory)
    np.testing.assert_allclose(vectors_of(name, directory, patches), expected, atol=1e-5)
    model = loaded(name, directory / name)
    layout = attrs.evolve(model.layout, piece_patches=patches)
    height, width = size_of(name, 0)
    encoding, pieces = Encoding(model.tower, pixels_of(name, 0), patches), 1
    while encoding.advance(1) is None:
        pieces += 1
    assert pieces == layout.num_pieces(layout.shape(ImageSize(width, height, "png"), "auto", 4096))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_interleaved_sections_are_heard(name: str, directory: Path) -> None:
    reference = read_references()[name]["prompts"]["two images"]
    case, _ = case_of(name, "two images", directory)
    ropes = [
        each.rope
        for _, each in loaded(name, directory / name).model.named_modules()
        if "rope" in each
    ]
    own = ropes[0].sections
    try:
        for rope in ropes:
            rope.sections = MropeSections((2, 3, 3), interleaved=True)
        assert error(case.logits(), reference) > 10 * CLOSE
    finally:
        for rope in ropes:
            rope.sections = own
