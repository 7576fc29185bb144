"""InternViT, the encoder of InternVL (transformers' `InternVLVisionModel`), for the tiles of one
image. Names of weights are transformers'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trouper.engine.vision.grouped_attention import GroupedHeads, Lengths, attend_in_groups
from trouper.engine.vision.layers import (
    HeadProjections,
    LayeredTower,
    Mlp,
    join_heads,
    split_heads,
)
from trouper.engine.vision.patch_rules import PatchRules
from trouper.engine.vision.patches import grid_of, patches_of, views_of
from trouper.engine.vision.tower import ACTIVATIONS, Heads, Weights
from trouper.protocol.media import Pixels

NORM_EPS = 1e-6
FUSED = ".qkv."
"""The publisher's name of queries, keys and values in one matrix."""
PUBLISHED_LAYER = r"vision_model\.encoder\.layers\.(\d+)\."
NAMES = (
    (r"vision_tower\.encoder\.layer\.", "layers."),
    (r"vision_tower\.", ""),
    (r"multi_modal_projector\.", "projector."),
    (PUBLISHED_LAYER + r"attn\.proj\.", r"layers.\1.attention.projection_layer."),
    (PUBLISHED_LAYER + r"attn\.", r"layers.\1.attention."),
    (PUBLISHED_LAYER + r"norm1\.", r"layers.\1.layernorm_before."),
    (PUBLISHED_LAYER + r"norm2\.", r"layers.\1.layernorm_after."),
    (PUBLISHED_LAYER + r"ls([12])", r"layers.\1.lambda_\2"),
    (PUBLISHED_LAYER, r"layers.\1."),
    (r"vision_model\.embeddings\.class_embedding", "embeddings.cls_token"),
    (r"vision_model\.embeddings\.patch_embedding\.", "embeddings.patch_embeddings.projection."),
    (r"vision_model\.embeddings\.position_embedding", "embeddings.position_embeddings"),
    (r"mlp1\.(?:layers\.)?0\.", "projector.layer_norm."),
    (r"mlp1\.(?:layers\.)?1\.", "projector.linear_1."),
    (r"mlp1\.(?:layers\.)?3\.", "projector.linear_2."),
)
"""Names of weights in checkpoints of transformers and of the publisher, and ours: see `towers`."""
NORMS = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}


class PatchEmbedding(nn.Module):
    def __init__(self, inputs: int, dim: int) -> None:
        super().__init__()
        self.projection = nn.Linear(inputs, dim)


class Embeddings(nn.Module):
    def __init__(self, inputs: int, side: int, dim: int) -> None:
        super().__init__()
        self.patch_embeddings = PatchEmbedding(inputs, dim)
        self.cls_token = mx.zeros((1, 1, dim))
        self.position_embeddings = mx.zeros((1, 1 + side**2, dim))


class Attention(HeadProjections):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        dim, eps = vision["hidden_size"], vision.get("layer_norm_eps", NORM_EPS)
        bias = vision.get("attention_bias", vision.get("qkv_bias", False))
        super().__init__(dim, vision["num_attention_heads"], bias=bias)
        self.projection_layer = nn.Linear(dim, dim)
        if vision.get("use_qk_norm", vision.get("qk_normalization", False)):
            self.q_norm = nn.RMSNorm(dim, eps=eps)
            self.k_norm = nn.RMSNorm(dim, eps=eps)

    def heads_of(self, x: mx.array) -> Heads:
        queries, keys = self.q_proj(x), self.k_proj(x)
        if "q_norm" in self:  # Over all heads.
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        return (
            split_heads(queries, self._heads),
            split_heads(keys, self._heads),
            split_heads(self.v_proj(x), self._heads),
        )


class Layer(nn.Module):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        dim, eps = vision["hidden_size"], vision.get("layer_norm_eps", NORM_EPS)
        norm = NORMS[vision.get("norm_type", "layer_norm")]
        self.attention = Attention(vision)
        self.mlp = Mlp(dim, vision["intermediate_size"], vision.get("hidden_act", "gelu"))
        self.layernorm_before = norm(dim, eps=eps)
        self.layernorm_after = norm(dim, eps=eps)
        self.lambda_1 = mx.ones((dim,))
        self.lambda_2 = mx.ones((dim,))

    def project_heads(self, x: mx.array, groups: Lengths) -> GroupedHeads:
        return GroupedHeads(*self.attention.heads_of(self.layernorm_before(x)), groups)

    def __call__(self, x: mx.array, heads: GroupedHeads, patches: slice) -> mx.array:
        attended = join_heads(attend_in_groups(heads, patches))
        x = x[patches] + self.lambda_1 * self.attention.projection_layer(attended)
        out: mx.array = x + self.lambda_2 * self.mlp(self.layernorm_after(x))
        return out


class Projector(nn.Module):
    def __init__(self, merged: int, out: int, activation: str) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(merged)
        self.linear_1 = nn.Linear(merged, out)
        self.linear_2 = nn.Linear(out, out)
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.linear_2(self._activation(self.linear_1(self.layer_norm(x))))
        return out


class InternTower(LayeredTower):
    """Implements `tower.Tower`. Behind the patches of each tile is one more, the tile's class."""

    patch_weight = "embeddings.patch_embeddings.projection.weight"
    stack_path = "layers"

    def __init__(self, config: Mapping[str, Any], rules: PatchRules, tile: int) -> None:
        """Raises `ValueError` for features of another layer than the last, or with a norm behind
        it."""
        super().__init__()
        vision = config["vision_config"]
        if config.get("vision_feature_layer", config.get("select_layer", -1)) != -1:
            raise ValueError("its vision_feature_layer is not the last layer")
        if not vision.get("use_mean_pooling", True):
            raise ValueError("its encoder has a norm behind the last layer (use_mean_pooling)")
        dim, self._side = vision["hidden_size"], tile // rules.patch_size
        self._rules, self._tile = rules, tile
        self.embeddings = Embeddings(rules.patch_values, self._side, dim)
        self.layers = [Layer(vision) for _ in range(vision["num_hidden_layers"])]
        merged, text_dim = dim * rules.merge_size**2, config["text_config"]["hidden_size"]
        activation = config.get("projector_hidden_act", "gelu")
        self.projector = Projector(merged, text_dim, activation)

    def embed(self, pixels: Pixels) -> tuple[mx.array, Lengths]:
        """The second: patches of each tile and of the overview."""
        views, embeddings = views_of(pixels, self._tile, self._rules), self.embeddings
        rows, columns = grid_of(views[0], self._rules)
        places = mx.array(np.append(1 + rows * self._side + columns, 0))
        dtype, dim = embeddings.cls_token.dtype, embeddings.cls_token.shape[-1]
        patches = mx.stack([patches_of(view, self._rules) for view in views]).astype(dtype)
        last = mx.broadcast_to(embeddings.cls_token, (len(views), 1, dim))
        embedded = embeddings.patch_embeddings.projection(patches)
        hidden = mx.concatenate([embedded, last], axis=1)
        hidden = hidden + embeddings.position_embeddings[:, places]
        return hidden.reshape(-1, dim), (hidden.shape[1],) * len(views)

    def project(self, hidden: mx.array, pixels: tuple[int, int]) -> mx.array:  # noqa: ARG002
        dim, merged = hidden.shape[-1], self._rules.merge_size**2
        patches = hidden.reshape(-1, self._side**2 + 1, dim)[:, :-1]
        # A token's patches lie behind each other.
        out: mx.array = self.projector(patches.reshape(-1, dim * merged))
        return out

    def sanitize(self, weights: Weights) -> Weights:
        """The publisher's checkpoints have queries, keys and values in one matrix, whose rows are
        also those of its scales."""
        made: Weights = {}
        for name, weight in weights.items():
            if FUSED not in name:
                made[name] = weight
                continue
            for part, rows in zip("qkv", mx.split(weight, 3), strict=True):
                made[name.replace(FUSED, f".{part}_proj.")] = rows
        return made
