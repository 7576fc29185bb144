"""The encoder of Kimi-VL and Kimi-K2.5, MoonViT (arXiv 2504.07491; transformers'
`Kimi_K25VisionModel`, whose halves of a head are pairs here), for one image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trouper.engine.vision.bounded_attention import attend, axial_angles, rotate_pairs, rotation_of
from trouper.engine.vision.layers import LayeredTower, PatchEmbedding, join_heads
from trouper.engine.vision.learned_positions import cubic_weights, positions_of
from trouper.engine.vision.patch_rules import PatchRules
from trouper.engine.vision.patches import grid_of, patches_of
from trouper.engine.vision.tower import ACTIVATIONS, Heads, Rotation
from trouper.protocol.media import Pixels

NORM_EPS = 1e-5


class Positions(nn.Module):
    def __init__(self, side: int, dim: int) -> None:
        super().__init__()
        self.weight = mx.zeros((side, side, dim))


class PositionedEmbedding(PatchEmbedding):
    def __init__(self, inputs: int, side: int, dim: int) -> None:
        super().__init__(inputs, dim)
        self.pos_emb = Positions(side, dim)


class Mlp(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.fc0 = nn.Linear(dim, inner)
        self.fc1 = nn.Linear(inner, dim)

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.fc1(ACTIVATIONS["gelu_pytorch_tanh"](self.fc0(x)))
        return out


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, inner: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm0 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.wqkv = nn.Linear(dim, 3 * dim)
        self.wo = nn.Linear(dim, dim)
        self.mlp = Mlp(dim, inner)

    def project_heads(self, x: mx.array, rotation: Rotation) -> Heads:
        projected = self.wqkv(self.norm0(x)).reshape(len(x), 3, self._heads, -1)
        queries, keys, values = mx.split(projected.transpose(1, 2, 0, 3), 3)
        return rotate_pairs(queries, *rotation), rotate_pairs(keys, *rotation), values

    def __call__(self, x: mx.array, heads: Heads, patches: slice) -> mx.array:
        x = x[patches] + self.wo(join_heads(attend(*heads, patches)))
        out: mx.array = x + self.mlp(self.norm1(x))
        return out


class Projector(nn.Module):
    """The patches of a token become one vector of the text model's size."""

    def __init__(self, dim: int, merge: int, out: int) -> None:
        super().__init__()
        self._merged = dim * merge**2
        self.pre_norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.linear_1 = nn.Linear(self._merged, self._merged)
        self.linear_2 = nn.Linear(self._merged, out)

    def __call__(self, x: mx.array) -> mx.array:
        """(patches, dim) to (tokens, text dim)."""
        x = self.pre_norm(x).reshape(-1, self._merged)
        out: mx.array = self.linear_2(nn.gelu(self.linear_1(x)))
        return out


class MoonVitTower(LayeredTower):
    """Implements `tower.Tower`."""

    patch_weight = "patch_embed.proj.weight"

    def __init__(self, config: Mapping[str, Any], rules: PatchRules) -> None:
        super().__init__()
        vision = config["vision_config"]
        dim, heads = _read(vision, "hidden_size"), _read(vision, "num_attention_heads")
        self._rules, self._half_head = rules, dim // heads // 2
        side = vision.get("init_pos_emb_height") or vision.get("pos_emb_height", 64)
        self.patch_embed = PositionedEmbedding(rules.patch_values, side, dim)
        inner = _read(vision, "intermediate_size")
        layers = range(_read(vision, "num_hidden_layers"))
        self.blocks = [Block(dim, heads, inner) for _ in layers]
        self.final_layernorm = nn.LayerNorm(dim, eps=NORM_EPS)
        out = config["text_config"]["hidden_size"]
        self.projector = Projector(dim, rules.merge_size, out)

    def embed(self, pixels: Pixels) -> tuple[mx.array, Rotation]:
        patches = patches_of(pixels, self._rules)
        hidden = self.patch_embed(patches.astype(self.final_layernorm.weight.dtype))
        rows, columns = grid_of(pixels, self._rules)
        down, along = axial_angles((rows, columns), self._half_head)
        table = self.patch_embed.pos_emb.weight
        positions = positions_of(table, cubic_weights, pixels, self._rules)
        # Of two neighbouring pairs the first turns by the column, the second by the row.
        angles = np.stack([along, down], axis=-1).reshape(len(rows), -1)
        return hidden + positions.astype(hidden.dtype), rotation_of([angles])

    def project(self, hidden: mx.array, pixels: tuple[int, int]) -> mx.array:  # noqa: ARG002
        out: mx.array = self.projector(self.final_layernorm(hidden))
        return out


def _read(vision: Mapping[str, Any], key: str) -> int:
    """K2.5's own config has other names."""
    value: int = vision.get(f"vt_{key}") or vision[key]
    return value
