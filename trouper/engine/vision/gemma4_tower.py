"""The encoders of Gemma 4 (transformers' `Gemma4VisionModel` and `Gemma4UnifiedVisionEmbedder`),
for one image, and their projectors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trouper.engine.vision.bounded_attention import attend, axial_angles, rotate, rotation_of
from trouper.engine.vision.layers import GatedMlp, LayeredTower, Stack, join_heads
from trouper.engine.vision.patch_rules import PatchRules
from trouper.engine.vision.patches import channel_last, grid_of
from trouper.engine.vision.tower import Heads, Rotation
from trouper.protocol.media import CHANNELS, Pixels

ROPE_BASE = 100.0
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""Names of a clipped layer's bounds in checkpoints."""


class ClippableLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, clipped: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self._clipped = clipped
        if clipped:
            for name in BOUNDS:
                self[name] = mx.array(0.0)

    def __call__(self, x: mx.array) -> mx.array:
        if not self._clipped:
            out: mx.array = self.linear(x)
            return out
        low, high, out_low, out_high = (self[name].astype(x.dtype) for name in BOUNDS)
        return mx.clip(self.linear(mx.clip(x, low, high)), out_low, out_high)


class Attention(nn.Module):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        dim, clipped = vision["hidden_size"], bool(vision.get("use_clipped_linears"))
        self._eps = vision.get("rms_norm_eps", 1e-6)
        self._head_dim = head_dim_of(vision)
        heads = vision["num_attention_heads"] * self._head_dim
        shared = vision.get("num_key_value_heads") or vision["num_attention_heads"]
        self.q_proj = ClippableLinear(dim, heads, clipped=clipped)
        self.k_proj = ClippableLinear(dim, shared * self._head_dim, clipped=clipped)
        self.v_proj = ClippableLinear(dim, shared * self._head_dim, clipped=clipped)
        self.o_proj = ClippableLinear(heads, dim, clipped=clipped)
        self.q_norm = nn.RMSNorm(self._head_dim, eps=self._eps)
        self.k_norm = nn.RMSNorm(self._head_dim, eps=self._eps)

    def project_heads(self, x: mx.array, rotation: Rotation) -> Heads:
        queries, keys, values = (
            project(x).reshape(1, len(x), -1, self._head_dim).transpose(0, 2, 1, 3)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = self.q_norm(queries), self.k_norm(keys)
        values = mx.fast.rms_norm(values, None, self._eps)
        return _rotate_halves(queries, rotation), _rotate_halves(keys, rotation), values

    def __call__(self, heads: Heads, patches: slice) -> mx.array:
        out: mx.array = self.o_proj(join_heads(attend(*heads, patches, scale=1.0)))
        return out


def head_dim_of(vision: Mapping[str, Any]) -> int:
    return int(vision.get("head_dim") or vision["hidden_size"] // vision["num_attention_heads"])


def _rotate_halves(x: mx.array, rotation: Rotation) -> mx.array:
    """Half of a head turns by the column, the other by the row."""
    cosines, sines = (part.reshape(len(part), 2, -1) for part in rotation)
    return rotate(x.reshape(*x.shape[:-1], 2, -1), cosines, sines).reshape(x.shape)


class Layer(nn.Module):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        dim, eps = vision["hidden_size"], vision.get("rms_norm_eps", 1e-6)
        self.self_attn = Attention(vision)
        linear = partial(ClippableLinear, clipped=bool(vision.get("use_clipped_linears")))
        activation = vision.get("hidden_activation", "gelu_pytorch_tanh")
        self.mlp = GatedMlp(dim, vision["intermediate_size"], activation, linear)
        self.input_layernorm = nn.RMSNorm(dim, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(dim, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(dim, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(dim, eps=eps)

    def project_heads(self, x: mx.array, rotation: Rotation) -> Heads:
        return self.self_attn.project_heads(self.input_layernorm(x), rotation)

    def __call__(self, x: mx.array, heads: Heads, patches: slice) -> mx.array:
        x = x[patches] + self.post_attention_layernorm(self.self_attn(heads, patches))
        inner = self.mlp(self.pre_feedforward_layernorm(x))
        out: mx.array = x + self.post_feedforward_layernorm(inner)
        return out


class PatchEmbedder(nn.Module):
    def __init__(self, vision: Mapping[str, Any], patch_size: int) -> None:
        super().__init__()
        dim, places = vision["hidden_size"], vision.get("position_embedding_size", 10_240)
        self.input_proj = nn.Linear(CHANNELS * patch_size**2, dim, bias=False)
        self.position_embedding_table = mx.zeros((2, places, dim))


class Projector(nn.Module):
    """To the text model's space."""

    def __init__(self, dim: int, text_dim: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.embedding_projection = nn.Linear(dim, text_dim, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.embedding_projection(mx.fast.rms_norm(x, None, self._eps))
        return out


class Gemma4Tower(LayeredTower):
    """Implements `tower.Tower`."""

    patch_weight = "patch_embedder.input_proj.weight"
    stack_path = "encoder.layers"

    def __init__(self, config: Mapping[str, Any], rules: PatchRules) -> None:
        super().__init__()
        vision = config["vision_config"]
        dim, eps = vision["hidden_size"], vision.get("rms_norm_eps", 1e-6)
        self._rules, self._head_dim = rules, head_dim_of(vision)
        rope = vision.get("rope_parameters") or {}
        self._base = float(rope.get("rope_theta") or ROPE_BASE)
        self.patch_embedder = PatchEmbedder(vision, rules.patch_size)
        self.encoder = Stack([Layer(vision) for _ in range(vision["num_hidden_layers"])])
        self._standardized = bool(vision.get("standardize"))
        if self._standardized:
            self.std_bias, self.std_scale = mx.zeros(dim), mx.zeros(dim)
        self.projector = Projector(dim, config["text_config"]["hidden_size"], eps)

    def embed(self, pixels: Pixels) -> tuple[mx.array, Rotation]:
        rows, columns = grid_of(pixels, self._rules)
        table = self.patch_embedder.position_embedding_table
        values = 2 * (channel_last(pixels, self._rules) - 0.5)
        hidden = self.patch_embedder.input_proj(values.astype(table.dtype))
        rotation = rotation_of(axial_angles((columns, rows), self._head_dim // 2, self._base))
        return hidden + table[0][mx.array(columns)] + table[1][mx.array(rows)], rotation

    def project(self, hidden: mx.array, pixels: tuple[int, int]) -> mx.array:  # noqa: ARG002
        # In float32: scaled numbers may exceed float16, and the bias cancels large ones.
        square = self._rules.merge_size**2
        pooled = hidden.astype(mx.float32).reshape(-1, square, hidden.shape[-1]).mean(axis=1)
        pooled = pooled.astype(hidden.dtype).astype(mx.float32) * hidden.shape[-1] ** 0.5
        if self._standardized:
            pooled = (pooled - self.std_bias) * self.std_scale
        out: mx.array = self.projector(pooled.astype(hidden.dtype))
        return out


class Gemma4UnifiedTower(LayeredTower):
    """An encoder without layers: each token is a patch, in the text model's space at once.
    Implements `tower.Tower`."""

    patch_weight = "patch_dense.weight"

    def __init__(self, config: Mapping[str, Any], rules: PatchRules) -> None:
        super().__init__()
        vision, size = config["vision_config"], rules.token_size
        dim, eps = vision["mm_embed_dim"], vision.get("rms_norm_eps", 1e-6)
        # A token's patches are one.
        self._rules = PatchRules(rules.mean, rules.std, rules.rescale, size, 1)
        self.patch_ln1 = nn.LayerNorm(CHANNELS * size**2)
        self.patch_dense = nn.Linear(CHANNELS * size**2, dim)
        self.patch_ln2 = nn.LayerNorm(dim)
        self.pos_embedding = mx.zeros((vision.get("mm_posemb_size", 1120), 2, dim))
        self.pos_norm = nn.LayerNorm(dim)
        self.projector = Projector(dim, config["text_config"]["hidden_size"], eps)

    @property
    def stack(self) -> list[Any]:
        return []

    def embed(self, pixels: Pixels) -> tuple[mx.array, Rotation]:
        rows, columns = grid_of(pixels, self._rules)
        patches = channel_last(pixels, self._rules).astype(self.patch_dense.bias.dtype)
        hidden = self.patch_ln2(self.patch_dense(self.patch_ln1(patches)))
        table = self.pos_embedding
        positions = table[mx.array(columns), 0] + table[mx.array(rows), 1]
        return self.pos_norm(hidden + positions), ()

    def project(self, hidden: mx.array, pixels: tuple[int, int]) -> mx.array:  # noqa: ARG002
        out: mx.array = self.projector(hidden)
        return out
