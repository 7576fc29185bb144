"""Loads the image encoder of a checkpoint, beside mlx-lm's text model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from trouper.engine.products.linear_layers import pack_as_stored
from trouper.engine.vision import intern_tower
from trouper.engine.vision.gemma4_tower import Gemma4Tower, Gemma4UnifiedTower
from trouper.engine.vision.gemma_layouts import Gemma3Layout
from trouper.engine.vision.glm_tower import GlmTower
from trouper.engine.vision.intern_layout import InternLayout
from trouper.engine.vision.layouts import Layout
from trouper.engine.vision.llama_tower import LlamaTower
from trouper.engine.vision.moonvit_tower import MoonVitTower
from trouper.engine.vision.patch_rules import PatchRules
from trouper.engine.vision.pixtral_tower import PixtralTower
from trouper.engine.vision.qwen2_tower import Qwen2Tower
from trouper.engine.vision.qwen_tower import QwenTower
from trouper.engine.vision.siglip_tower import SiglipTower
from trouper.engine.vision.tile_layouts import IdeficsLayout, LfmLayout, LlamaLayout
from trouper.engine.vision.tower import Weights
from trouper.protocol.media import CHANNELS

AnyTower = (
    Qwen2Tower
    | QwenTower
    | PixtralTower
    | SiglipTower
    | Gemma4Tower
    | Gemma4UnifiedTower
    | MoonVitTower
    | LlamaTower
    | intern_tower.InternTower
    | GlmTower
)
Renamings = tuple[tuple[re.Pattern[str], str], ...]


def _renamings(*pairs: tuple[str, str]) -> Renamings:
    """The converters put `model.` before, or do not."""
    return tuple((re.compile(f"^(?:model\\.)?{pattern}"), name) for pattern, name in pairs)


QWEN_NAMES = _renamings((r"(?:language_model\.)?(?:visual|vision_tower)\.", ""))
PIXTRAL_NAMES = _renamings(
    (r"(?:vision_tower|vision_encoder)\.(?:vision_model\.)?", ""),
    (r"(?:multi_modal_projector|vision_projection)\.", "projector."),
)
MOONVIT_NAMES = _renamings(
    (r"vision_tower\.(?:encoder\.)?(blocks\.\d+\.)attn\.", r"\1"),
    (r"vision_tower\.(?:encoder\.)?", ""),
    (r"mm_projector\.proj\.(?:layers\.)?0\.", "projector.linear_1."),
    (r"mm_projector\.proj\.(?:layers\.)?2\.", "projector.linear_2."),
    (r"(?:multi_modal_projector|mm_projector)\.", "projector."),
)
SIGLIP_NAMES = _renamings(
    (r"vision_tower\.(?:vision_model\.)?(?:encoder\.)?", ""),
    (r"vision_model\.(?:encoder\.)?", ""),
    (r"connector\.modality_projection\.", "projector."),
    (r"multi_modal_projector\.", "projector."),
)
GEMMA4_NAMES = _renamings((r"vision_tower\.", ""), (r"embed_vision\.", "projector."))
UNIFIED_NAMES = _renamings(
    (r"embed_vision\.(?:multimodal_embedder\.|(?=embedding_proj))", "projector."),
    (r"(?:embed_vision|vision_embedder)\.", ""),
)
LLAMA_NAMES = _renamings((r"vision_model\.", ""), (r"multi_modal_projector\.", "projector."))
INTERN_NAMES = _renamings(*intern_tower.NAMES)
"""Names of an encoder's weights in checkpoints of transformers and of mlx-vlm, and ours. The first
that fits counts."""
TOWERS: Mapping[str, tuple[Callable[[Mapping[str, Any], PatchRules], AnyTower], Renamings]] = {
    "qwen2": (Qwen2Tower, QWEN_NAMES),
    "qwen3": (QwenTower, QWEN_NAMES),
    "mistral3": (PixtralTower, PIXTRAL_NAMES),
    "pixtral": (PixtralTower, PIXTRAL_NAMES),
    "gemma4_unified": (Gemma4UnifiedTower, UNIFIED_NAMES),
    "gemma4": (Gemma4Tower, GEMMA4_NAMES),
    "kimi": (MoonVitTower, MOONVIT_NAMES),
    "glm4": (GlmTower, QWEN_NAMES),
}
"""Encoders without tiles, by the begin of `model_type`. The first that fits counts."""
DERIVED = re.compile(r"(?:^|\.)(?:position_ids|inv_freq)$")
"""Some checkpoints store what follows from the config."""
UNCLIPPED = re.compile(rf"{DERIVED.pattern}|\.(?:input|output)_(?:min|max)$")
"""Also bounds of Gemma 4's layers, which checkpoints may store, but not use."""


def load_tower(directory: Path, config: Mapping[str, Any], layout: Layout) -> AnyTower:
    """Load the encoder lazily, as it is stored. Raises `ValueError` if weights and config
    do not make one."""
    tower, names = _empty(config, layout)
    unused = DERIVED if config["vision_config"].get("use_clipped_linears") else UNCLIPPED
    weights = _flat_patches(_weights(directory, names, unused), tower.patch_weight, layout)
    weights = tower.sanitize(weights)
    pack_as_stored(tower, weights)
    _require_all(tower, weights)
    tower.load_weights(list(weights.items()))
    tower.eval()
    return tower


def _empty(config: Mapping[str, Any], layout: Layout) -> tuple[AnyTower, Renamings]:
    try:
        return make_tower(config, layout)
    except (KeyError, TypeError) as error:
        raise ValueError(f"its vision_config makes no encoder: {error}") from error


def make_tower(config: Mapping[str, Any], layout: Layout) -> tuple[AnyTower, Renamings]:
    """An encoder without weights, and names of them. `config`: the checkpoint's. Raises KeyError
    and TypeError."""
    kind, rules = str(config["model_type"]), layout.patches
    if isinstance(layout, Gemma3Layout | IdeficsLayout | LfmLayout):
        return SiglipTower(config, rules, layout.tile), SIGLIP_NAMES
    if isinstance(layout, LlamaLayout):
        return LlamaTower(config, rules, layout.tile), LLAMA_NAMES
    if isinstance(layout, InternLayout):
        return intern_tower.InternTower(config, rules, layout.tile), INTERN_NAMES
    make, names = next(made for begin, made in TOWERS.items() if kind.startswith(begin))
    return make(config, rules), names


def _weights(directory: Path, names: Renamings, unused: re.Pattern[str]) -> Weights:
    """The encoder's weights by our names; lazy."""
    weights: Weights = {}
    for path in sorted(directory.glob("model*.safetensors")):
        tensors: Any = mx.load(str(path))
        for name, weight in tensors.items():
            renamed = _rename(name, names)
            if renamed and not unused.search(name):
                weights[renamed] = weight
    return weights


def _rename(name: str, names: Renamings) -> str:
    """Our name of a weight; "" if it is of another part."""
    for pattern, ours in names:
        if pattern.match(name):
            return pattern.sub(ours, name, count=1)
    return ""


def _flat_patches(weights: Weights, name: str, layout: Layout) -> Weights:
    """The convolution over patches becomes a matrix, from PyTorch's order of axes or MLX's."""
    weight = weights.get(name)
    if weight is None or weight.ndim == 2:
        return weights
    if weight.shape[-1] == CHANNELS and weight.shape[-2] == layout.patches.patch_size:
        weight = weight.moveaxis(-1, 1)
    return weights | {name: weight.reshape(weight.shape[0], -1)}


def _require_all(tower: nn.Module, weights: Weights) -> None:
    """Raises `ValueError`."""
    shapes = {name: array.shape for name, array in tree_flatten(tower.parameters())}
    stored = {name: array.shape for name, array in weights.items()}
    wrong = sorted(name for name, _ in shapes.items() ^ stored.items())
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ValueError(f"its image encoder's weights and config.json differ: {wrong[0]}{more}")
