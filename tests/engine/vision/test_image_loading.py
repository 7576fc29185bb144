"""Encoders of checkpoints as people have them: names of two converters, quantized in part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from safetensors.numpy import load_file

from tests.engine.vision.families import (
    FAMILIES,
    GEMMA,
    START,
    TOKEN_IDS,
    Models,
    checkpoint,
    picture,
    preprocessor_of,
    save,
    write_checkpoint,
)
from tests.engine.vision.test_image_passes import encode
from tests.families import save as save_text
from tests.families import write_json
from trouper.engine.loading import image_loading
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.step import StepEngine
from trouper.engine.vision.layouts import layout_of
from trouper.engine.vision.step_memory import encoder_step_bytes
from trouper.engine.vision.tower import Tower, patches_at_once
from trouper.engine.vision.towers import load_tower
from trouper.engine.vision.vector_sharing import DistantTower
from trouper.protocol.installing import command_for
from trouper.protocol.settings import Settings

PICTURE = picture(16, 24, 1)
PICTURES = {name: picture(32, 32, 1) if name == "gemma3" else picture(56, 80, 1) for name in GEMMA}


def served(directory: Path, said: list[str] | None = None) -> EvaluatedModel:
    settings = Settings(model=str(directory), self_check="off")
    return load(settings, (said if said is not None else []).append)


def tower_of(name: str, directory: Path) -> Tower:
    config = json.loads((directory / "config.json").read_text())
    return load_tower(directory, config, layout_of(config, preprocessor_of(name), TOKEN_IDS))


@pytest.mark.parametrize("name", ["qwen3_vl", "mistral3"])
def test_a_server_loads_the_encoder_with_the_text_model(
    vision_model: Models, name: str, tmp_path: Path
) -> None:
    said: list[str] = []
    loaded = served(checkpoint(name, tmp_path / name), said)
    assert loaded.images.tower is not None
    layout = attrs.evolve(vision_model(name).layout, piece_patches=patches_at_once())
    assert loaded.card.images == layout
    assert loaded.card.no_images == ""
    limit = Settings().max_image_tokens
    vision = FAMILIES[name]["vision_config"]
    assert loaded.card.encoder_step_bytes == encoder_step_bytes(vision, layout, limit, 4) > 2**26
    assert any(line.startswith("images: an encoder of") for line in said)
    assert not isinstance(loaded.images.tower, DistantTower)
    both = [loaded.model, loaded.images.tower]
    assert loaded.card.weights_bytes == sum(
        array.nbytes for part in both for _, array in tree_flatten(part.parameters())
    )
    expected = encode(vision_model(name).tower, PICTURE).embeddings
    vectors = encode(loaded.images.tower, PICTURE).embeddings
    assert np.array_equal(np.array(vectors), np.array(expected))
    assert StepEngine(loaded.model, 512, tower=loaded.images.tower)._encoder is not None


@pytest.mark.parametrize("name", GEMMA)
def test_gemmas_load_with_their_encoder(vision_model: Models, name: str, tmp_path: Path) -> None:
    loaded = load(Settings(model=str(checkpoint(name, tmp_path / name))), lambda _line: None)
    layout = attrs.evolve(vision_model(name).layout, piece_patches=patches_at_once())
    assert loaded.images.tower is not None
    assert not isinstance(loaded.images.tower, DistantTower)
    assert (loaded.card.images, loaded.card.no_images) == (layout, "")
    assert loaded.card.encoder_step_bytes > (0 if name == "gemma4_unified" else 2**26)
    assert loaded.images.tower is not None
    expected = encode(vision_model(name).tower, PICTURES[name]).embeddings
    vectors = encode(loaded.images.tower, PICTURES[name]).embeddings
    assert np.array_equal(np.array(vectors), np.array(expected))
    assert loaded.images.tower.embedding_scale == 8.0


def test_gemma_3_has_blank_lines_around_an_image(tmp_path: Path) -> None:
    """As its processor writes them. A client's text is no marker."""
    loaded = served(checkpoint("gemma3", tmp_path / "gemma3"))
    content = [{"type": "text", "text": "a <start_of_image> "}, {"type": "image"}]
    rendered = loaded.tokenizer.render_chat([{"role": "user", "content": content}], {})
    assert rendered is not None
    assert rendered.count("\n\n<start_of_image>\n\n") == 1
    assert loaded.tokenizer.encode(rendered, special=False).count(START) == 1


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "mistral3"])
@pytest.mark.parametrize("quantized", ["language_model", "vision_tower"])
def test_a_quantized_checkpoint_has_either_part_packed(
    name: str, quantized: str, tmp_path: Path, vision_model: Models
) -> None:
    save(name, tmp_path, quantized=quantized)
    tower = tower_of(name, tmp_path)
    packed, expected = (
        np.array(encode(each, PICTURE).embeddings) for each in (tower, vision_model(name).tower)
    )
    if quantized == "language_model":
        assert np.array_equal(packed, expected)
    else:
        assert not np.array_equal(packed, expected)
        assert np.corrcoef(packed.ravel(), expected.ravel())[0, 1] > 0.995


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "mistral3"])
def test_the_names_and_axes_of_transformers_make_the_same_encoder(
    name: str, tmp_path: Path, vision_model: Models
) -> None:
    save(name, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    write_checkpoint(tmp_path, FAMILIES[name], dict(map(_as_transformers, weights.items())))
    renamed, expected = tower_of(name, tmp_path), vision_model(name).tower
    for (path, array), (_, other) in zip(
        parameters_of(renamed), parameters_of(expected), strict=True
    ):
        assert np.array_equal(np.array(array), np.array(other)), path


def parameters_of(tower: object) -> list[tuple[str, mx.array]]:
    assert isinstance(tower, nn.Module)
    return tree_flatten(tower.parameters())


def _as_transformers(item: tuple[str, Any]) -> tuple[str, mx.array]:
    name, weight = item
    if "patch_embed.proj.weight" in name or "patch_conv.weight" in name:
        weight = np.ascontiguousarray(np.moveaxis(weight, -1, 1))
    for ours, theirs in (
        ("vision_tower.vision_model.", "model.vision_tower."),
        ("vision_tower.blocks", "model.visual.blocks"),
        ("vision_tower.pos_embed", "model.visual.pos_embed"),
        ("vision_tower.patch_embed", "model.visual.patch_embed"),
        ("vision_tower.merger", "model.visual.merger"),
        ("vision_tower.deepstack", "model.visual.deepstack"),
        ("multi_modal_projector.", "model.multi_modal_projector."),
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head", "lm_head"),
    ):
        name = name.replace(ours, theirs)
    return name, mx.array(weight)


def test_a_text_model_takes_no_images(tmp_path: Path) -> None:
    card = served(save_text("llama", tmp_path / "llama")).card
    assert (card.images, card.no_images) == (None, "the model is for text alone")


def test_without_pillow_text_is_served_and_the_card_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_loading, "find_spec", lambda _name: None)
    loaded = served(checkpoint("qwen3_vl", tmp_path / "model"))
    assert loaded.images.tower is None
    assert loaded.card.images is None
    assert loaded.card.no_images == f"images need Pillow: {command_for('images')}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"depth": 5}, "image encoder's weights and config.json differ: blocks.4."),
        ({"hidden_size": 36}, "image encoder's weights and config.json differ"),
        ({"intermediate_size": None}, "makes no encoder"),
        ({"hidden_act": "tanh_of_yore"}, "makes no encoder"),
    ],
)
def test_an_encoder_that_cannot_be_made_leaves_text(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    directory = checkpoint("qwen3_vl", tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    write_json(
        directory / "config.json", config | {"vision_config": config["vision_config"] | change}
    )
    loaded = served(directory)
    assert loaded.card.images is None
    assert reason in loaded.card.no_images
