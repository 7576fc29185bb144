"""Loads the image encoder of a checkpoint, beside mlx-lm's text model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from trouper.engine.vision.gemma4_tower import Gemma4Tower, Gemma4UnifiedTower
from trouper.engine.vision.layouts import Layout
from trouper.engine.vision.patches import CHANNELS
from trouper.engine.vision.pixtral_tower import PixtralTower
from trouper.engine.vision.qwen_tower import QwenTower
from trouper.engine.vision.siglip_tower import SiglipTower
from trouper.engine.vision.tower import Weights

AnyTower = QwenTower | PixtralTower | SiglipTower | Gemma4Tower | Gemma4UnifiedTower
Names = tuple[tuple[re.Pattern[str], str], ...]

QWEN_NAMES = ((re.compile(r"^(?:model\.)?(?:language_model\.)?(?:visual|vision_tower)\."), ""),)
PIXTRAL_NAMES = (
    (re.compile(r"^(?:model\.)?(?:vision_tower|vision_encoder)\.(?:vision_model\.)?"), ""),
    (re.compile(r"^(?:model\.)?(?:multi_modal_projector|vision_projection)\."), "projector."),
)
GEMMA4_NAMES = (
    (re.compile(r"^(?:model\.)?vision_tower\."), ""),
    (re.compile(r"^(?:model\.)?embed_vision\."), "projector."),
)
UNIFIED_NAMES = (
    (
        re.compile(r"^(?:model\.)?embed_vision\.(?:multimodal_embedder\.|(?=embedding_proj))"),
        "projector.",
    ),
    (re.compile(r"^(?:model\.)?(?:embed_vision|vision_embedder)\."), ""),
)
"""Names of an encoder's weights in checkpoints of transformers and of mlx-vlm, and ours."""
DERIVED = re.compile(r"(?:^|\.)(?:position_ids|inv_freq)$")
"""Some checkpoints store what follows from the config."""
UNCLIPPED = re.compile(r"\.(?:input|output)_(?:min|max)$")
"""Bounds of Gemma 4's layers, which checkpoints may store, but not use."""


def load_tower(directory: Path, config: Mapping[str, Any], layout: Layout) -> AnyTower:
    """Load the encoder lazily, as it is stored. Raises `ValueError` if weights and config
    do not make one."""
    tower, names = _empty(config, layout)
    unused = None if config["vision_config"].get("use_clipped_linears") else UNCLIPPED
    weights = _flat_patches(_weights(directory, names, unused), tower.patch_weight, layout)
    _quantize(tower, weights)
    _require_all(tower, weights)
    tower.load_weights(list(weights.items()))
    tower.eval()
    return tower


def _empty(config: Mapping[str, Any], layout: Layout) -> tuple[AnyTower, Names]:
    kind, rules = str(config["model_type"]), layout.patches
    try:
        if kind.startswith("qwen3"):
            return QwenTower(config, rules), QWEN_NAMES
        if kind == "gemma3":
            return SiglipTower(config, rules), PIXTRAL_NAMES
        if kind == "gemma4":
            return Gemma4Tower(config, rules), GEMMA4_NAMES
        if kind == "gemma4_unified":
            return Gemma4UnifiedTower(config, rules), UNIFIED_NAMES
        return PixtralTower(config, rules), PIXTRAL_NAMES
    except (KeyError, TypeError) as error:
        raise ValueError(f"its vision_config makes no encoder: {error}") from error


def _weights(directory: Path, names: Names, unused: re.Pattern[str] | None) -> Weights:
    """The encoder's weights by our names; lazy."""
    weights: Weights = {}
    for path in sorted(directory.glob("model*.safetensors")):
        tensors: Any = mx.load(str(path))
        for name, weight in tensors.items():
            if DERIVED.search(name) or (unused is not None and unused.search(name)):
                continue
            for pattern, prefix in names:
                if pattern.match(name):
                    weights[pattern.sub(prefix, name, count=1)] = weight
                    break
    return weights


def _flat_patches(weights: Weights, name: str, layout: Layout) -> Weights:
    """The convolution over patches becomes a matrix, from PyTorch's order of axes or MLX's."""
    weight = weights.get(name)
    if weight is None or weight.ndim == 2:
        return weights
    if weight.shape[-1] == CHANNELS and weight.shape[-2] == layout.patches.patch_size:
        weight = weight.moveaxis(-1, 1)
    return weights | {name: weight.reshape(weight.shape[0], -1)}


def _quantize(tower: nn.Module, weights: Weights) -> None:
    """Most conversions leave encoders unquantized; layers with scales are quantized."""

    def packed(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        return infer_quant_config(path, module, weights)

    nn.quantize(tower, class_predicate=packed)


def _require_all(tower: nn.Module, weights: Weights) -> None:
    """Raises `ValueError`."""
    shapes = {name: array.shape for name, array in tree_flatten(tower.parameters())}
    stored = {name: array.shape for name, array in weights.items()}
    wrong = sorted(name for name, _ in shapes.items() ^ stored.items())
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ValueError(f"its image encoder's weights and config.json differ: {wrong[0]}{more}")
