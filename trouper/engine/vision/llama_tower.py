"""The encoder of Llama 4 (transformers' `Llama4VisionModel`), for the tiles of one image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trouper.engine.vision.bounded_attention import axial_angles, rotate_pairs, rotation_of
from trouper.engine.vision.grouped_attention import GroupedHeads, Places, attend_in_groups
from trouper.engine.vision.layers import HeadProjections, LayeredTower, Mlp, Stack, join_heads
from trouper.engine.vision.patch_rules import PatchRules
from trouper.engine.vision.patches import grid_of, patches_of, views_of
from trouper.engine.vision.tower import Heads, Rotation
from trouper.protocol.media import Pixels

NORM_EPS = 1e-5


class PatchEmbedding(nn.Module):
    def __init__(self, inputs: int, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, dim, bias=False)


class Attention(HeadProjections):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.o_proj = nn.Linear(dim, dim)

    def project_heads(self, x: mx.array, rotation: Rotation) -> Heads:
        queries, keys, values = self.heads_of(x)
        return rotate_pairs(queries, *rotation), rotate_pairs(keys, *rotation), values


class Layer(nn.Module):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        dim = vision["hidden_size"]
        self.self_attn = Attention(dim, vision["num_attention_heads"])
        self.mlp = Mlp(dim, vision["intermediate_size"], "gelu")
        self.input_layernorm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.post_attention_layernorm = nn.LayerNorm(dim, eps=NORM_EPS)

    def __call__(self, x: mx.array, heads: GroupedHeads, patches: slice) -> mx.array:
        x = x[patches] + self.self_attn.o_proj(join_heads(attend_in_groups(heads, patches)))
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return out


class AdapterMlp(nn.Module):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        inner, out = vision["projector_input_dim"], vision["projector_output_dim"]
        self.fc1 = nn.Linear(vision["intermediate_size"], inner, bias=False)
        self.fc2 = nn.Linear(inner, out, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return nn.gelu(self.fc2(nn.gelu(self.fc1(x))))


class Adapter(nn.Module):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        self.mlp = AdapterMlp(vision)


class Projector(nn.Module):
    def __init__(self, inputs: int, out: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(inputs, out, bias=False)


class LlamaTower(LayeredTower):
    """Implements `tower.Tower`. Behind the patches of each tile is one more, the tile's class."""

    patch_weight = "patch_embedding.linear.weight"
    stack_path = "model.layers"

    def __init__(self, config: Mapping[str, Any], rules: PatchRules, tile: int) -> None:
        super().__init__()
        vision = config["vision_config"]
        dim, self._side = vision["hidden_size"], tile // rules.patch_size
        self._rules, self._tile = rules, tile
        self._half_head = dim // vision["num_attention_heads"] // 2
        self.patch_embedding = PatchEmbedding(rules.patch_values, dim)
        self.class_embedding = mx.zeros((dim,))
        self.positional_embedding_vlm = mx.zeros((self._side**2 + 1, dim))
        self.layernorm_pre = nn.LayerNorm(dim, eps=NORM_EPS)
        self.layernorm_post = nn.LayerNorm(dim, eps=NORM_EPS)
        self.model = Stack([Layer(vision) for _ in range(vision["num_hidden_layers"])])
        self.vision_adapter = Adapter(vision)
        text_dim = config["text_config"]["hidden_size"]
        self.projector = Projector(vision["vision_output_dim"], text_dim)

    def embed(self, pixels: Pixels) -> tuple[mx.array, Places]:
        views = views_of(pixels, self._tile, self._rules)
        rows, columns = grid_of(views[0], self._rules)
        order = mx.array([*(rows * self._side + columns).tolist(), self._side**2])
        dtype, dim = self.class_embedding.dtype, self.class_embedding.shape[0]
        patches = mx.stack([patches_of(view, self._rules) for view in views]).astype(dtype)
        last = mx.broadcast_to(self.class_embedding, (len(views), 1, dim))
        hidden = mx.concatenate([self.patch_embedding.linear(patches), last], axis=1)
        hidden = self.layernorm_pre(hidden + self.positional_embedding_vlm[order])
        down, along = axial_angles((rows + 1, columns + 1), self._half_head)
        # The class does not turn.
        angles = np.pad(np.concatenate([along, down], axis=1), ((0, 1), (0, 0)))
        rotation = rotation_of([np.tile(angles, (len(views), 1))])
        return hidden.reshape(-1, dim), Places(rotation, (hidden.shape[1],) * len(views))

    def project_heads(self, index: int, hidden: mx.array, places: Places) -> GroupedHeads:
        layer = self.model.layers[index]
        normed = layer.input_layernorm(hidden)
        queries, keys, values = layer.self_attn.project_heads(normed, places.rotation)
        return GroupedHeads(queries, keys, values, places.groups)

    def project(self, hidden: mx.array, pixels: tuple[int, int]) -> mx.array:  # noqa: ARG002
        dim, merged = hidden.shape[-1], self._rules.merge_size**2
        patches = self.layernorm_post(hidden).reshape(-1, self._side**2 + 1, dim)[:, :-1]
        # A token's patches lie behind each other.
        adapted = self.vision_adapter.mlp(patches.reshape(-1, dim * merged))
        out: mx.array = self.projector.linear_1(adapted)
        return out
