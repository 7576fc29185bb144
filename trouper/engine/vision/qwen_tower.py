"""The encoder of Qwen3-VL and Qwen3.5 (transformers' `Qwen3VLVisionModel`), for one image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trouper.engine.vision.bounded_attention import attend, axial_angles, rotate, rotation_of
from trouper.engine.vision.layers import LayeredTower, PatchEmbedding, PreNormBlock, join_heads
from trouper.engine.vision.patch_rules import PatchRules
from trouper.engine.vision.patches import framed_patches_of, grid_of
from trouper.engine.vision.tower import ACTIVATIONS, Heads, Rotation
from trouper.protocol.media import Pixels

NORM_EPS = 1e-6


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, *, input_bias: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=input_bias)
        self.proj = nn.Linear(dim, dim, bias=bias)

    def project_heads(self, x: mx.array, rotation: Rotation) -> Heads:
        projected = self.qkv(x).reshape(len(x), 3, self.heads, -1).transpose(1, 2, 0, 3)
        queries, keys = rotate(projected[:1], *rotation), rotate(projected[1:2], *rotation)
        return queries, keys, projected[2:]

    def __call__(self, heads: Heads, patches: slice) -> mx.array:
        out: mx.array = self.proj(join_heads(attend(*heads, patches)))
        return out


class Mlp(nn.Module):
    def __init__(self, dim: int, inner: int, activation: str) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(dim, inner)
        self.linear_fc2 = nn.Linear(inner, dim)
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.linear_fc2(self._activation(self.linear_fc1(x)))
        return out


class Block(PreNormBlock):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        dim = config["hidden_size"]
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.attn = Attention(dim, config["num_heads"])
        activation = config.get("hidden_act", "gelu_pytorch_tanh")
        self.mlp = Mlp(dim, config["intermediate_size"], activation)


class Merger(nn.Module):
    """The patches of a token become one vector of the text model's size."""

    def __init__(self, config: Mapping[str, Any], *, norm_after: bool) -> None:
        super().__init__()
        self._merged = config["hidden_size"] * config.get("spatial_merge_size", 2) ** 2
        self._norm_after = norm_after
        self.norm = nn.LayerNorm(
            self._merged if norm_after else config["hidden_size"], eps=NORM_EPS
        )
        self.linear_fc1 = nn.Linear(self._merged, self._merged)
        self.linear_fc2 = nn.Linear(self._merged, config["out_hidden_size"])

    def __call__(self, x: mx.array) -> mx.array:
        """(patches, dim) to (tokens, text dim)."""
        if self._norm_after:
            x = self.norm(x.reshape(-1, self._merged))
        else:
            x = self.norm(x).reshape(-1, self._merged)
        out: mx.array = self.linear_fc2(nn.gelu(self.linear_fc1(x)))
        return out


class QwenTower(LayeredTower):
    """Implements `tower.Tower`."""

    patch_weight = "patch_embed.proj.weight"

    def __init__(self, config: Mapping[str, Any], rules: PatchRules) -> None:
        super().__init__()
        vision = config["vision_config"]
        dim = vision["hidden_size"]
        self._rules = rules
        self._half_head = dim // vision["num_heads"] // 2
        positions = vision.get("num_position_embeddings", 2304)
        self._side = int(positions**0.5)
        self._deepstack = _deepstack_layers(config)
        self.patch_embed = PatchEmbedding(rules.patch_values, dim)
        self.pos_embed = nn.Embedding(positions, dim)
        self.blocks = [Block(vision) for _ in range(vision["depth"])]
        self.merger = Merger(vision, norm_after=False)
        self.deepstack_merger_list = [Merger(vision, norm_after=True) for _ in self._deepstack]

    @property
    def num_deepstack(self) -> int:
        return len(self._deepstack)

    def embed(self, pixels: Pixels) -> tuple[mx.array, Rotation]:
        inputs = framed_patches_of(pixels, self._rules)
        hidden = self.patch_embed(inputs.astype(self.patch_embed.proj.bias.dtype))
        positions = self._positions(pixels).astype(hidden.dtype)
        angles = axial_angles(grid_of(pixels, self._rules), self._half_head)
        return hidden + positions, rotation_of(angles)

    def deepstack_of(self, index: int, hidden: mx.array) -> mx.array | None:
        if index not in self._deepstack:
            return None
        merger = self.deepstack_merger_list[self._deepstack.index(index)]
        out: mx.array = merger(hidden)
        return out

    def project(self, hidden: mx.array, pixels: tuple[int, int]) -> mx.array:  # noqa: ARG002
        out: mx.array = self.merger(hidden)
        return out

    def _positions(self, pixels: Pixels) -> mx.array:
        """(patches, dim): the learned grid of positions, bilinearly resampled; corners stay."""
        rows, columns = grid_of(pixels, self._rules)
        last = self._side - 1
        y = np.linspace(0, last, rows.max() + 1, dtype=np.float32)[rows]
        x = np.linspace(0, last, columns.max() + 1, dtype=np.float32)[columns]
        top, left = y.astype(np.int32), x.astype(np.int32)
        bottom, right = np.minimum(top + 1, last), np.minimum(left + 1, last)
        down, along = y - top, x - left
        corners = (
            (top, left, (1 - down) * (1 - along)),
            (top, right, (1 - down) * along),
            (bottom, left, down * (1 - along)),
            (bottom, right, down * along),
        )
        shares = [
            self.pos_embed(mx.array(row * self._side + column))
            * mx.array(share.astype(np.float32))[:, None]
            for row, column, share in corners
        ]
        return shares[0] + shares[1] + shares[2] + shares[3]


def _deepstack_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Indices of the encoder's layers whose vectors the text model gets, too. Qwen3.5 has none,
    whatever its config says."""
    if not str(config["model_type"]).startswith("qwen3_vl"):
        return ()
    return tuple(config["vision_config"].get("deepstack_visual_indexes", (8, 16, 24)))
