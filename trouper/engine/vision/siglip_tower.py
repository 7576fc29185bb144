"""The encoder of Gemma 3 (transformers' `SiglipVisionModel`), for one image, and its projector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trouper.engine.vision.bounded_attention import attend
from trouper.engine.vision.layouts import PatchRules
from trouper.engine.vision.patches import CHANNELS, grid_of, patches_of
from trouper.engine.vision.tower import ACTIVATIONS, Heads, Rotation
from trouper.protocol.media import Pixels


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def project_heads(self, x: mx.array) -> Heads:
        queries, keys, values = (
            project(x).reshape(1, len(x), self.heads, -1).transpose(0, 2, 1, 3)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return queries, keys, values

    def __call__(self, heads: Heads, patches: slice) -> mx.array:
        attended = attend(*heads, patches)[0].transpose(1, 0, 2)
        out: mx.array = self.out_proj(attended.reshape(len(attended), -1))
        return out


class Mlp(nn.Module):
    def __init__(self, dim: int, inner: int, activation: str) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, inner)
        self.fc2 = nn.Linear(inner, dim)
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.fc2(self._activation(self.fc1(x)))
        return out


class Layer(nn.Module):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        dim, eps = vision["hidden_size"], vision.get("layer_norm_eps", 1e-6)
        self.layer_norm1 = nn.LayerNorm(dim, eps=eps)
        self.layer_norm2 = nn.LayerNorm(dim, eps=eps)
        self.self_attn = Attention(dim, vision["num_attention_heads"])
        activation = vision.get("hidden_act", "gelu_pytorch_tanh")
        self.mlp = Mlp(dim, vision["intermediate_size"], activation)

    def project_heads(self, x: mx.array) -> Heads:
        return self.self_attn.project_heads(self.layer_norm1(x))

    def __call__(self, x: mx.array, heads: Heads, patches: slice) -> mx.array:
        """Compute the layer for some patches of x (patches, dim)."""
        x = x[patches] + self.self_attn(heads, patches)
        out: mx.array = x + self.mlp(self.layer_norm2(x))
        return out


class Encoder(nn.Module):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        self.layers = [Layer(vision) for _ in range(vision["num_hidden_layers"])]


class Embeddings(nn.Module):
    """`side`: patches on each side of the image."""

    def __init__(self, dim: int, rules: PatchRules, side: int) -> None:
        super().__init__()
        self.patch_embedding = nn.Linear(CHANNELS * rules.patch_size**2, dim)
        self.position_embedding = nn.Embedding(side**2, dim)


class Projector(nn.Module):
    """To the text model's space: each token is the mean of a square of patches."""

    def __init__(self, config: Mapping[str, Any], merge: int) -> None:
        super().__init__()
        vision = config["vision_config"]
        dim, text_dim = vision["hidden_size"], config["text_config"]["hidden_size"]
        self._merge, self._eps = merge, vision.get("layer_norm_eps", 1e-6)
        self.mm_input_projection_weight = mx.zeros((dim, text_dim))
        self.mm_soft_emb_norm = nn.RMSNorm(dim)

    def __call__(self, x: mx.array) -> mx.array:
        """(patches, dim) to (tokens, text dim)."""
        pooled = x.astype(mx.float32).reshape(-1, self._merge**2, x.shape[-1]).mean(axis=1)
        gains = 1 + self.mm_soft_emb_norm.weight.astype(mx.float32)
        normed = mx.fast.rms_norm(pooled.astype(x.dtype).astype(mx.float32), gains, self._eps)
        return normed.astype(x.dtype) @ self.mm_input_projection_weight


class SiglipTower(nn.Module):
    """Implements `tower.Tower`."""

    embedding_scale = 1.0
    patch_weight = "embeddings.patch_embedding.weight"
    num_deepstack = 0

    def __init__(self, config: Mapping[str, Any], rules: PatchRules) -> None:
        """`config`: the checkpoint's."""
        super().__init__()
        vision = config["vision_config"]
        dim = vision["hidden_size"]
        self._rules = rules
        self._side = vision.get("image_size", 896) // rules.patch_size
        self.embeddings = Embeddings(dim, rules, self._side)
        self.encoder = Encoder(vision)
        self.post_layernorm = nn.LayerNorm(dim, eps=vision.get("layer_norm_eps", 1e-6))
        self.projector = Projector(config, rules.merge_size)

    @property
    def num_layers(self) -> int:
        return len(self.encoder.layers)

    def embed(self, pixels: Pixels) -> tuple[mx.array, Rotation]:
        rows, columns = grid_of(pixels, self._rules)
        patch_embedding = self.embeddings.patch_embedding
        patches = patches_of(pixels, self._rules).astype(patch_embedding.bias.dtype)
        positions = self.embeddings.position_embedding(mx.array(rows * self._side + columns))
        return patch_embedding(patches) + positions, ()

    def project_heads(self, index: int, hidden: mx.array, rotation: Rotation) -> Heads:  # noqa: ARG002
        heads: Heads = self.encoder.layers[index].project_heads(hidden)
        return heads

    def run_patches(self, index: int, hidden: mx.array, heads: Heads, patches: slice) -> mx.array:
        out: mx.array = self.encoder.layers[index](hidden, heads, patches)
        return out

    def deepstack_of(self, index: int, hidden: mx.array) -> mx.array | None:  # noqa: ARG002
        return None

    def project(self, hidden: mx.array, pixels: tuple[int, int]) -> mx.array:  # noqa: ARG002
        out: mx.array = self.projector(self.post_layernorm(hidden))
        return out
