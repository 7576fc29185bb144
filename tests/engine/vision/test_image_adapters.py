"""LoRA adapters that were trained on vision models change text, and rows with images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.adapters import flags, layers_of, save_adapter
from tests.engine.driver import Request
from tests.engine.vision.driver import ImageDriver
from tests.engine.vision.families import VOCABULARY, Models, VisionModel, checkpoint
from tests.engine.vision.test_image_rows import TOKENS, certain_prompt, no_image, two_images
from trouper.engine.loading.model_loading import load
from trouper.engine.step import StepEngine
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings

SEEDS = {"qwen3_vl": 2, "qwen3_5": 1, "mistral3": 1}
"""Of adapters whose answers are certain, and have no token of videos, which mlx-vlm takes for
one."""
PREFIXES = {
    "transformers 5": "base_model.model.model.language_model.",
    "transformers 4": "base_model.model.language_model.model.",
}
MLX_PREFIX = "base_model.model.language_model.model."


def with_prefix(adapter: Path, prefix: str) -> Path:
    """An adapter of PEFT under another class's names."""
    file = adapter / "adapter_model.safetensors"
    weights = {name.replace(MLX_PREFIX, prefix): part for name, part in load_file(file).items()}
    assert all(name.startswith(prefix) for name in weights)
    save_file(weights, file)
    return adapter


def answer_with(model: VisionModel, adapter: Path, tokens: list[int], images: Any) -> list[int]:
    """By mlx-vlm, with the adapter added to its weights."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = load_file(adapter / "adapter_model.safetensors")
    assert model.reference is not None
    modules = dict(model.reference.named_modules())
    kept = {}
    for path in layers_of(model.model):
        a, b = (weights[f"base_model.model.{path}.lora_{side}.weight"] for side in "AB")
        layer = modules[path]
        kept[path] = layer.weight
        layer.weight = layer.weight + mx.array(b @ a) * (config["lora_alpha"] / config["r"])
    try:
        return model.answer(tokens, images, TOKENS)
    finally:
        for path, weight in kept.items():
            modules[path].weight = weight


@pytest.mark.parametrize("name", SEEDS)
def test_an_adapter_of_the_vision_model_is_added(
    vision_model: Models, name: str, tmp_path: Path
) -> None:
    model = vision_model(name)
    adapter = save_adapter(model.model, tmp_path / "plain", SEEDS[name], form="peft")
    text, shown = certain_prompt(model, no_image), certain_prompt(model, two_images)
    expected = [
        answer_with(model, adapter, prompt.tokens, prompt.images) for prompt in (text, shown)
    ]
    assert expected != [text.answer, shown.answer]
    directories = []
    for number, prefix in enumerate(PREFIXES.values()):
        made = save_adapter(model.model, tmp_path / f"a{number}", SEEDS[name], form="peft")
        directories.append(with_prefix(made, prefix))
    directory = checkpoint(name, tmp_path / name)
    loaded = load(
        Settings(model=str(directory), adapter=flags(directories), no_ssd=True), lambda _: None
    )
    assert loaded.card.no_images == ""
    engine = StepEngine(
        loaded.model,
        VOCABULARY,
        tower=loaded.images.tower,
        capabilities=loaded.card.capabilities,
        adapters=("a0", "a1"),
    )
    driver = ImageDriver(engine, 9)
    items = driver.encode(shown.spans, shown.images)
    rows = driver.play(
        [
            *(Request(text.tokens, TOKENS, adapter=each) for each in ("a0", "a1", "")),
            *(shown.request(items, adapter=each) for each in ("a0", "a1", "")),
        ]
    )
    answers = [row.tokens for row in rows]
    assert answers == [*[expected[0]] * 2, text.answer, *[expected[1]] * 2, shown.answer]


@pytest.mark.parametrize(
    "layer",
    [
        "model.visual.blocks.0.attn.qkv",
        "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
        "model.multi_modal_projector.linear_1",
    ],
)
def test_an_adapter_of_the_encoder_is_refused_by_name(
    vision_model: Models, layer: str, tmp_path: Path
) -> None:
    model = vision_model("qwen3_vl")
    directory = checkpoint("qwen3_vl", tmp_path / "model")
    adapter = save_adapter(model.model, tmp_path / "adapter", 1, form="peft")
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    own = "base_model.model.language_model.model.layers.0.self_attn.q_proj"
    pair = {side: weights[f"{own}.lora_{side}.weight"] for side in "AB"}
    added = {f"base_model.model.{layer}.lora_{side}.weight": pair[side] for side in "AB"}
    save_file(weights | added, file)
    settings = Settings(model=str(directory), adapter=flags([adapter]), no_ssd=True)
    with pytest.raises(ModelUnusable, match=f"{layer} is of the image encoder"):
        load(settings, lambda _: None)
    # As PEFT writes a layer that was not trained.
    added[f"base_model.model.{layer}.lora_B.weight"] = np.zeros_like(pair["B"])
    save_file(weights | added, file)
    assert load(settings, lambda _: None).card.adapters


def test_adapter_path_names_the_encoder_too(vision_model: Models, tmp_path: Path) -> None:
    model = vision_model("qwen3_vl")
    directory = checkpoint("qwen3_vl", tmp_path / "model")
    adapter = save_adapter(model.model, tmp_path / "adapter", 1)
    settings = Settings(model=str(directory), adapter_path=str(adapter), no_ssd=True)
    assert load(settings, lambda _: None).card.no_images == ""
    file = adapter / "adapters.safetensors"
    name = "vision_tower.blocks.0.attn.qkv.lora_a"
    save_file(load_file(file) | {name: np.zeros((32, 4), np.float32)}, file)
    with pytest.raises(ModelUnusable, match=f"{name} is of the image encoder"):
        load(settings, lambda _: None)
