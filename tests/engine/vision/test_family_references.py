"""Families whose answers are known: they are those of transformers with torch
(`tests/engine/vision_references.py`) in company, restored at any token, and with drafts; and a
server loads them."""

from __future__ import annotations

from pathlib import Path

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.engine.vision.families import TEMPLATE, Numbers
from tests.engine.vision.reference_cases import (
    CLOSE,
    case_of,
    error,
    loaded,
    pixels_of,
    prompt_of,
)
from tests.engine.vision.test_image_passes import encode
from tests.engine.vision.test_image_rows import (
    answer_after_warming_up,
    draft_behind_images,
    restore_at_every_token,
    share_passes,
)
from tests.engine.vision_models import CONFIGS, FIRST, PREPROCESSORS, TOKEN_IDS, VOCABULARY
from tests.engine.vision_references import save_checkpoint, size_of, span_tokens
from tests.families import write_json
from tests.image_files import encoded
from trouper.actors.runtime.image_prompts import insert_images
from trouper.engine.adaptations.image_passes import MropeSections
from trouper.engine.loading.model_loading import load
from trouper.engine.platform import device
from trouper.engine.vision.bounded_attention import attend
from trouper.engine.vision.encoder import Encoding
from trouper.engine.vision.grouped_attention import GroupedHeads
from trouper.engine.vision.layouts import layout_of
from trouper.engine.vision.siglip_tower import SiglipTower
from trouper.engine.vision.step_memory import encoder_step_bytes
from trouper.engine.vision.tower import patches_at_once
from trouper.protocol.media import ImageSize, ImageSource
from trouper.protocol.requests import ChatPrompt
from trouper.protocol.settings import Settings
from trouper.storage.model_files import takes_images

MARKERS = {
    "qwen2_vl": "<|image_pad|>",
    "qwen2_5_vl": "<|image_pad|>",
    "kimi_vl": "<|media_pad|>",
    "kimi_k25": "<|media_pad|>",
    "llama4": "<|image|>",
    "glm4v": "<|image|>",
    "glm4v_moe": "<|image|>",
    "internvl": "<IMG_CONTEXT>",
    "internvl_chat": "<IMG_CONTEXT>",
}
every_family = pytest.mark.parametrize("name", tuple(CONFIGS)[len(FIRST) :])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


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


@pytest.mark.parametrize("name", ["qwen2_5_vl", "idefics3", "lfm2_vl", "llama4", "internvl"])
def test_patches_that_attend_to_other_groups_are_heard(
    name: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = vectors_of(name, directory)

    def to_all(heads: GroupedHeads, patches: slice) -> mx.array:
        return attend(heads.queries, heads.keys, heads.values, patches)

    modules = {"qwen2_5_vl": "qwen2", "llama4": "llama", "internvl": "intern"}
    module = f"{modules.get(name, 'siglip')}_tower"
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


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "glm4v"])
def test_interleaved_sections_are_heard(name: str, directory: Path) -> None:
    case, reference = case_of(name, "two images", directory)
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


def test_halves_that_turn_together_are_heard(directory: Path) -> None:
    """GLM's dense text turns neighbours."""
    case, reference = case_of("glm4v", "two images", directory)
    ropes = [
        each.rope
        for _, each in loaded("glm4v", directory / "glm4v").model.named_modules()
        if "rope" in each
    ]
    try:
        for rope in ropes:
            rope.traditional = False
        assert error(case.logits(), reference) > 10 * CLOSE
    finally:
        for rope in ropes:
            rope.traditional = True
