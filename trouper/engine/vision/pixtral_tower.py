"""The encoder of Pixtral and Mistral 3 (transformers' `PixtralVisionModel`), for one image, and
their projectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trouper.engine.vision.bounded_attention import attend, rotate, rotation_of
from trouper.engine.vision.layers import (
    GatedMlp,
    HeadProjections,
    LayeredTower,
    Stack,
    join_heads,
    unbiased,
)
from trouper.engine.vision.patch_rules import PatchRules
from trouper.engine.vision.patches import grid_of, patches_of
from trouper.engine.vision.tower import ACTIVATIONS, Heads, Rotation
from trouper.protocol.media import Pixels

ROPE_BASE = 10_000.0
NORM_EPS = 1e-5


class Attention(HeadProjections):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def project_heads(self, x: mx.array, rotation: Rotation) -> Heads:
        queries, keys, values = self.heads_of(x)
        return rotate(queries, *rotation), rotate(keys, *rotation), values

    def __call__(self, heads: Heads, patches: slice) -> mx.array:
        out: mx.array = self.o_proj(join_heads(attend(*heads, patches)))
        return out


class Layer(nn.Module):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        dim = vision["hidden_size"]
        self.attention_norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.ffn_norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.attention = Attention(dim, vision["num_attention_heads"])
        activation = vision.get("hidden_act", "gelu")
        self.feed_forward = GatedMlp(dim, vision["intermediate_size"], activation, unbiased)

    def project_heads(self, x: mx.array, rotation: Rotation) -> Heads:
        return self.attention.project_heads(self.attention_norm(x), rotation)

    def __call__(self, x: mx.array, heads: Heads, patches: slice) -> mx.array:
        x = x[patches] + self.attention(heads, patches)
        out: mx.array = x + self.feed_forward(self.ffn_norm(x))
        return out


class PatchMerger(nn.Module):
    def __init__(self, dim: int, merge: int) -> None:
        super().__init__()
        self.merging_layer = nn.Linear(dim * merge**2, dim, bias=False)


class Projector(nn.Module):
    """To the text model's space: Mistral 3 merges `merge` x `merge` patches, Pixtral none."""

    def __init__(self, config: Mapping[str, Any], merge: int) -> None:
        super().__init__()
        dim, text = config["vision_config"]["hidden_size"], config["text_config"]
        self._merge = merge
        self._activation = ACTIVATIONS[config.get("projector_hidden_act", "gelu")]
        if merge > 1:
            self.norm = nn.RMSNorm(dim, eps=text["rms_norm_eps"])
            self.patch_merger = PatchMerger(dim, merge)
        bias = config.get("multimodal_projector_bias", merge == 1)
        self.linear_1 = nn.Linear(dim, text["hidden_size"], bias=bias)
        self.linear_2 = nn.Linear(text["hidden_size"], text["hidden_size"], bias=bias)

    def __call__(self, x: mx.array, rows: int, columns: int) -> mx.array:
        """(rows * columns, dim) to (tokens, text dim)."""
        if self._merge > 1:
            merge, dim = self._merge, x.shape[-1]
            grid = self.norm(x).reshape(rows // merge, merge, columns // merge, merge, dim)
            x = self.patch_merger.merging_layer(
                grid.transpose(0, 2, 4, 1, 3).reshape(-1, dim * merge**2)
            )
        out: mx.array = self.linear_2(self._activation(self.linear_1(x)))
        return out


class PixtralTower(LayeredTower):
    """Implements `tower.Tower`."""

    patch_weight = "patch_conv.weight"
    stack_path = "transformer.layers"

    def __init__(self, config: Mapping[str, Any], rules: PatchRules) -> None:
        """Raises `ValueError` for features of another layer than the last."""
        super().__init__()
        vision = config["vision_config"]
        if config.get("vision_feature_layer", -1) != -1:
            raise ValueError("its vision_feature_layer is not the last layer")
        dim = vision["hidden_size"]
        # The encoder takes patches row by row; the projector merges them.
        self._rules = attrs.evolve(rules, merge_size=1)
        self._head_dim = vision.get("head_dim") or dim // vision["num_attention_heads"]
        self._base = _rope_base(vision)
        self.patch_conv = nn.Linear(rules.patch_values, dim, bias=False)
        self.ln_pre = nn.RMSNorm(dim, eps=NORM_EPS)
        layers = range(vision["num_hidden_layers"])
        self.transformer = Stack([Layer(vision) for _ in layers])
        self.projector = Projector(config, rules.merge_size)

    def embed(self, pixels: Pixels) -> tuple[mx.array, Rotation]:
        patches = patches_of(pixels, self._rules)
        hidden = self.patch_conv(patches.astype(self.ln_pre.weight.dtype))
        return self.ln_pre(hidden), self._rotation(pixels)

    def project(self, hidden: mx.array, pixels: tuple[int, int]) -> mx.array:
        rows, columns = (size // self._rules.patch_size for size in pixels)
        out: mx.array = self.projector(hidden, rows, columns)
        return out

    def _rotation(self, pixels: Pixels) -> Rotation:
        """Even frequencies turn by the row, odd ones by the column."""
        exponents = np.arange(0, self._head_dim, 2, dtype=np.float32) / self._head_dim
        frequencies = (1.0 / self._base**exponents).astype(np.float32)
        rows, columns = grid_of(pixels, self._rules)
        return rotation_of([np.outer(rows, frequencies[::2]), np.outer(columns, frequencies[1::2])])


def _rope_base(vision: Mapping[str, Any]) -> float:
    parameters = vision.get("rope_parameters") or {}
    return float(parameters.get("rope_theta") or vision.get("rope_theta") or ROPE_BASE)
