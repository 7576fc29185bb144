"""SigLIP, the encoder of Gemma 3, Idefics3, SmolVLM and LFM2-VL, for one image or its tiles
(transformers' `SiglipVisionModel`, `SmolVLMVisionTransformer` and `Siglip2VisionModel`), and its
projectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trouper.engine.vision.grouped_attention import GroupedHeads, Lengths, attend_in_groups
from trouper.engine.vision.layers import HeadProjections, LayeredTower, Mlp, join_heads
from trouper.engine.vision.learned_positions import linear_weights, positions_of
from trouper.engine.vision.patch_rules import PatchRules
from trouper.engine.vision.patches import channel_last, grid_of, patches_of, views_of
from trouper.engine.vision.tower import ACTIVATIONS
from trouper.protocol.media import Pixels

NORM_EPS = 1e-6
IDEFICS_DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
}
"""Of transformers. SmolVLM's published configs leave out what is so."""


class Embeddings(nn.Module):
    def __init__(self, inputs: int, side: int, dim: int) -> None:
        super().__init__()
        self.patch_embedding = nn.Linear(inputs, dim)
        self.position_embedding = nn.Embedding(side**2, dim)


class Attention(HeadProjections):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.out_proj = nn.Linear(dim, dim)

    def __call__(self, heads: GroupedHeads, patches: slice) -> mx.array:
        out: mx.array = self.out_proj(join_heads(attend_in_groups(heads, patches)))
        return out


class Layer(nn.Module):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        dim, eps = vision["hidden_size"], vision.get("layer_norm_eps", NORM_EPS)
        self.layer_norm1 = nn.LayerNorm(dim, eps=eps)
        self.layer_norm2 = nn.LayerNorm(dim, eps=eps)
        self.self_attn = Attention(dim, vision["num_attention_heads"])
        activation = vision.get("hidden_act", "gelu_pytorch_tanh")
        self.mlp = Mlp(dim, vision["intermediate_size"], activation)

    def project_heads(self, x: mx.array, groups: Lengths) -> GroupedHeads:
        return GroupedHeads(*self.self_attn.heads_of(self.layer_norm1(x)), groups)

    def __call__(self, x: mx.array, heads: GroupedHeads, patches: slice) -> mx.array:
        x = x[patches] + self.self_attn(heads, patches)
        out: mx.array = x + self.mlp(self.layer_norm2(x))
        return out


class GemmaProjector(nn.Module):
    """A token is the mean of a square of patches. `merge`: its side in patches."""

    def __init__(self, config: Mapping[str, Any], dim: int, merge: int) -> None:
        super().__init__()
        self._square, self._eps = merge**2, config["vision_config"].get("layer_norm_eps", NORM_EPS)
        self.mm_input_projection_weight = mx.zeros((dim, config["text_config"]["hidden_size"]))
        self.mm_soft_emb_norm = nn.RMSNorm(dim)

    def __call__(self, x: mx.array) -> mx.array:
        """(patches, dim) to (tokens, text dim)."""
        pooled = x.astype(mx.float32).reshape(-1, self._square, x.shape[-1]).mean(axis=1)
        gains = 1 + self.mm_soft_emb_norm.weight.astype(mx.float32)
        normed = mx.fast.rms_norm(pooled.astype(x.dtype).astype(mx.float32), gains, self._eps)
        return normed.astype(x.dtype) @ self.mm_input_projection_weight


class IdeficsProjector(nn.Module):
    """The patches of a token become one vector of the text model's size."""

    def __init__(self, config: Mapping[str, Any], dim: int, merge: int) -> None:
        super().__init__()
        self._merged = dim * merge**2
        self.proj = nn.Linear(self._merged, config["text_config"]["hidden_size"], bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """(patches, dim) to (tokens, text dim)."""
        out: mx.array = self.proj(x.reshape(-1, self._merged))
        return out


class LfmProjector(nn.Module):
    """As `IdeficsProjector`."""

    def __init__(self, config: Mapping[str, Any], dim: int, merge: int) -> None:
        super().__init__()
        self._merged = dim * merge**2
        self._activation = ACTIVATIONS[config.get("projector_hidden_act", "gelu")]
        inner, bias = config.get("projector_hidden_size", 2560), config.get("projector_bias", True)
        if config.get("projector_use_layernorm", True):
            self.layer_norm = nn.LayerNorm(self._merged)
        self.linear_1 = nn.Linear(self._merged, inner, bias=bias)
        self.linear_2 = nn.Linear(inner, config["text_config"]["hidden_size"], bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        x = x.reshape(-1, self._merged)
        if "layer_norm" in self:
            x = self.layer_norm(x)
        out: mx.array = self.linear_2(self._activation(self.linear_1(x)))
        return out


PROJECTORS: Mapping[str, type[GemmaProjector | IdeficsProjector | LfmProjector]] = {
    "gemma3": GemmaProjector,
    "idefics3": IdeficsProjector,
    "smolvlm": IdeficsProjector,
    "lfm2_vl": LfmProjector,
    "lfm2-vl": LfmProjector,
}


class SiglipTower(LayeredTower):
    """Implements `tower.Tower`. Patches attend to those of their tile."""

    patch_weight = "embeddings.patch_embedding.weight"
    stack_path = "layers"

    def __init__(self, config: Mapping[str, Any], rules: PatchRules, tile: int) -> None:
        """Raises `ValueError` for features of another layer than the last."""
        super().__init__()
        projector, vision = PROJECTORS[config["model_type"]], config["vision_config"]
        if projector is IdeficsProjector:
            vision = IDEFICS_DEFAULTS | vision
        self._is_lfm = projector is LfmProjector
        if self._is_lfm and config.get("vision_feature_layer", -1) != -1:
            raise ValueError("its vision_feature_layer is not the last layer")
        dim = vision["hidden_size"]
        self._rules, self._tile = rules, tile
        self._side = tile // rules.patch_size
        if self._is_lfm:
            self._side = int(vision.get("num_patches", 256) ** 0.5)
        self.embeddings = Embeddings(rules.patch_values, self._side, dim)
        self.layers = [Layer(vision) for _ in range(vision["num_hidden_layers"])]
        self.post_layernorm = nn.LayerNorm(dim, eps=vision.get("layer_norm_eps", NORM_EPS))
        self.projector = projector(config, dim, rules.merge_size)

    def embed(self, pixels: Pixels) -> tuple[mx.array, Lengths]:
        """The second: patches of each tile and of the overview."""
        views = views_of(pixels, self._tile, self._rules)
        patches = [self._patches_of(view) for view in views]
        dtype = self.post_layernorm.weight.dtype
        hidden = self.embeddings.patch_embedding(mx.concatenate(patches).astype(dtype))
        positions = mx.concatenate([self._positions(view) for view in views])
        return hidden + positions.astype(dtype), tuple(map(len, patches))

    def project(self, hidden: mx.array, pixels: tuple[int, int]) -> mx.array:  # noqa: ARG002
        out: mx.array = self.projector(self.post_layernorm(hidden))
        return out

    def _patches_of(self, view: Pixels) -> mx.array:
        make = channel_last if self._is_lfm else patches_of
        return make(view, self._rules)

    def _positions(self, view: Pixels) -> mx.array:
        """(patches, dim): learned, for a tile; LFM2-VL's are resampled to the view's grid."""
        side = self._side
        if not self._is_lfm:
            rows, columns = grid_of(view, self._rules)
            learned: mx.array = self.embeddings.position_embedding(mx.array(rows * side + columns))
            return learned
        table = self.embeddings.position_embedding(mx.arange(side**2)).reshape(side, side, -1)
        return positions_of(table, linear_weights, view, self._rules)
