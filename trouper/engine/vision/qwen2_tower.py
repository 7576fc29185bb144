"""The encoder of Qwen2-VL and Qwen2.5-VL (transformers' `Qwen2VisionTransformerPretrainedModel`,
`Qwen2_5_VisionTransformerPretrainedModel`), for one image. In most layers of Qwen2.5-VL patches
attend to those of their window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from trouper.engine.vision.bounded_attention import axial_angles, rotation_of
from trouper.engine.vision.grouped_attention import GroupedHeads, Lengths, Places, attend_in_groups
from trouper.engine.vision.layers import (
    GatedMlp,
    LayeredTower,
    Mlp,
    PatchEmbedding,
    join_heads,
)
from trouper.engine.vision.patch_rules import PatchRules
from trouper.engine.vision.patches import framed_patches_of, grid_of
from trouper.engine.vision.qwen_tower import Attention
from trouper.protocol.media import Pixels

NORM_EPS = 1e-6


class Block(nn.Module):
    def __init__(self, vision: Mapping[str, Any], *, windows: bool) -> None:
        super().__init__()
        dim = _dim(vision)
        norm = nn.RMSNorm if windows else nn.LayerNorm
        self.norm1, self.norm2 = norm(dim, eps=NORM_EPS), norm(dim, eps=NORM_EPS)
        self.attn = Attention(dim, vision["num_heads"])
        if windows:
            activation = vision.get("hidden_act", "silu")
            self.mlp: nn.Module = GatedMlp(dim, vision["intermediate_size"], activation, nn.Linear)
        else:
            inner = int(dim * vision.get("mlp_ratio", 4))
            self.mlp = Mlp(dim, inner, vision.get("hidden_act", "quick_gelu"))

    def __call__(self, x: mx.array, heads: GroupedHeads, patches: slice) -> mx.array:
        x = x[patches] + self.attn.proj(join_heads(attend_in_groups(heads, patches)))
        out: mx.array = x + self.mlp(self.norm2(x))
        return out


class Merger(nn.Module):
    """The patches of a token become one vector of the text model's size."""

    def __init__(self, dim: int, merged: int, out: int, *, windows: bool) -> None:
        super().__init__()
        self._merged = merged
        norm = nn.RMSNorm if windows else nn.LayerNorm
        self.ln_q = norm(dim, eps=NORM_EPS)
        self.mlp = [nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, out)]

    def __call__(self, x: mx.array) -> mx.array:
        """(patches, dim) to (tokens, text dim)."""
        x = self.ln_q(x).reshape(-1, self._merged)
        for layer in self.mlp:
            x = layer(x)
        return x


class Qwen2Tower(LayeredTower):
    """Implements `tower.Tower`."""

    patch_weight = "patch_embed.proj.weight"

    def __init__(self, config: Mapping[str, Any], rules: PatchRules) -> None:
        super().__init__()
        vision, windows = config["vision_config"], config["model_type"] == "qwen2_5_vl"
        dim, merged = _dim(vision), _dim(vision) * rules.merge_size**2
        self._rules = rules
        self._half_head = dim // vision["num_heads"] // 2
        self._window = vision.get("window_size", 112) // rules.token_size if windows else 0
        self._full_layers = tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31)))
        self.patch_embed = PatchEmbedding(rules.patch_values, dim, bias=False)
        self.blocks = [Block(vision, windows=windows) for _ in range(vision["depth"])]
        out = vision["out_hidden_size"] if windows else vision["hidden_size"]
        self.merger = Merger(dim, merged, out, windows=windows)

    def embed(self, pixels: Pixels) -> tuple[mx.array, Places]:
        """The groups are windows, or all patches."""
        inputs = framed_patches_of(pixels, self._rules)
        hidden = self.patch_embed(inputs.astype(self.merger.ln_q.weight.dtype))
        angles = axial_angles(grid_of(pixels, self._rules), self._half_head)
        lengths: Lengths = (len(inputs),)
        if self._window:
            order, lengths = self._windows((pixels.height, pixels.width))
            hidden, angles = hidden[mx.array(order)], [axis[order] for axis in angles]
        return hidden, Places(rotation_of(angles), lengths)

    def project_heads(self, index: int, hidden: mx.array, places: Places) -> GroupedHeads:
        block = self.blocks[index]
        heads = block.attn.project_heads(block.norm1(hidden), places.rotation)
        is_full = not self._window or index in self._full_layers
        return GroupedHeads(*heads, (len(hidden),) if is_full else places.groups)

    def project(self, hidden: mx.array, pixels: tuple[int, int]) -> mx.array:
        merged: mx.array = self.merger(hidden)
        if not self._window:
            return merged
        order, _ = self._windows(pixels)
        unit = self._rules.merge_size**2
        return merged[mx.array(np.argsort(order[::unit]))]

    def _windows(self, size: tuple[int, int]) -> tuple[NDArray[np.int64], Lengths]:
        """Order of patches by windows, and patches of each. Windows at the right and lower edges
        are smaller."""
        rows, columns = (side // self._rules.token_size for side in size)
        unit, window = self._rules.merge_size**2, self._window
        tokens = np.arange(rows * columns).reshape(rows, columns)
        windows = [
            tokens[top : top + window, left : left + window].ravel()
            for top in range(0, rows, window)
            for left in range(0, columns, window)
        ]
        order = np.concatenate(windows)
        patches = (order[:, None] * unit + np.arange(unit)).ravel()
        return patches, tuple(len(each) * unit for each in windows)


def _dim(vision: Mapping[str, Any]) -> int:
    """Qwen2-VL's `hidden_size` is the text model's."""
    dim: int = vision.get("embed_dim") or vision["hidden_size"]
    return dim
