"""The encoder of GLM-4.xV (transformers' `Glm4vVisionModel`), for one image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trouper.engine.vision.bounded_attention import axial_angles, rotation_of
from trouper.engine.vision.layers import (
    GatedMlp,
    LayeredTower,
    PatchEmbedding,
    PreNormBlock,
    unbiased,
)
from trouper.engine.vision.learned_positions import cubic_weights, positions_of
from trouper.engine.vision.patch_rules import PatchRules
from trouper.engine.vision.patches import framed_patches_of, grid_of
from trouper.engine.vision.qwen_tower import Attention
from trouper.engine.vision.tower import Rotation, Weights
from trouper.protocol.media import Pixels

NORM_EPS = 1e-5
DOWNSAMPLE = "downsample.weight"


class Block(PreNormBlock):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        dim, eps = vision["hidden_size"], vision.get("rms_norm_eps", NORM_EPS)
        bias = vision.get("attention_bias", False)
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=eps), nn.RMSNorm(dim, eps=eps)
        self.attn = Attention(dim, vision["num_heads"], input_bias=bias, bias=False)
        activation = vision.get("hidden_act", "silu")
        self.mlp = GatedMlp(dim, vision["out_hidden_size"], activation, unbiased)


class Merger(GatedMlp):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        dim, activation = vision["out_hidden_size"], vision.get("hidden_act", "silu")
        super().__init__(dim, vision["intermediate_size"], activation, unbiased)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.post_projection_norm = nn.LayerNorm(dim)

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(nn.gelu(self.post_projection_norm(self.proj(x))))


class Embeddings(nn.Module):
    def __init__(self, side: int, dim: int) -> None:
        super().__init__()
        self.position_embedding = nn.Embedding(side**2, dim)


class GlmTower(LayeredTower):
    """Implements `tower.Tower`."""

    patch_weight = "patch_embed.proj.weight"

    def __init__(self, config: Mapping[str, Any], rules: PatchRules) -> None:
        super().__init__()
        vision = config["vision_config"]
        dim, eps = vision["hidden_size"], vision.get("rms_norm_eps", NORM_EPS)
        self._rules, self._half_head = rules, dim // vision["num_heads"] // 2
        self._side = vision.get("image_size", 336) // rules.patch_size
        self._merged = dim * rules.merge_size**2
        self.patch_embed = PatchEmbedding(rules.patch_values, dim)
        self.post_conv_layernorm = nn.RMSNorm(dim, eps=eps)
        self.embeddings = Embeddings(self._side, dim)
        self.blocks = [Block(vision) for _ in range(vision["depth"])]
        self.post_layernorm = nn.RMSNorm(dim, eps=eps)
        self.downsample = nn.Linear(self._merged, vision["out_hidden_size"])
        self.merger = Merger(vision)

    def sanitize(self, weights: Weights) -> Weights:
        """The convolution over the patches of a token becomes a matrix, from PyTorch's order of
        axes or MLX's."""
        weight = weights.get(DOWNSAMPLE)
        if weight is None or weight.ndim == 2:
            return weights
        if weight.shape[1] != weight.shape[2]:
            weight = weight.moveaxis(1, -1)
        return weights | {DOWNSAMPLE: weight.reshape(len(weight), -1)}

    def embed(self, pixels: Pixels) -> tuple[mx.array, Rotation]:
        inputs = framed_patches_of(pixels, self._rules)
        hidden = self.patch_embed(inputs.astype(self.patch_embed.proj.bias.dtype))
        hidden = self.post_conv_layernorm(hidden)
        learned = self.embeddings.position_embedding(mx.arange(self._side**2))
        table = learned.reshape(self._side, self._side, -1)
        places = positions_of(table, cubic_weights, pixels, self._rules)
        rotation = rotation_of(axial_angles(grid_of(pixels, self._rules), self._half_head))
        return hidden + places.astype(hidden.dtype), rotation

    def project(self, hidden: mx.array, pixels: tuple[int, int]) -> mx.array:  # noqa: ARG002
        # A token's patches lie behind each other.
        merged = self.post_layernorm(hidden).reshape(-1, self._merged)
        out: mx.array = self.merger(self.downsample(merged))
        return out
