"""EmbeddingGemma 2, for texts: what belongs to images and sounds is not loaded.

Names of weights and config are those of transformers (models/embedding_gemma2).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from trouper.engine.encoders.encoder import (
    Encoder,
    Weights,
    activation,
    attend,
    heads_of,
    padding_mask,
    require,
    window_mask,
    without,
)
from trouper.protocol.problems import ModelUnusable

COMPUTED: Mapping[str, tuple[Any, ...]] = {"hidden_activation": ("gelu_pytorch_tanh",)}
PREFIXES = ("model.language_model.", "language_model.", "model.")
UNUSED = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")
SLIDING = "sliding_attention"
SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim")


@attrs.frozen(kw_only=True)
class LayerArgs:
    heads: int
    kv_heads: int
    head_dim: int
    windowed: bool
    base: float


@attrs.frozen(kw_only=True)
class ModelArgs:
    vocabulary: int
    width: int
    inner: int
    side_width: int
    """Of the gate that each layer gets from the token embeddings."""
    dimensions: int
    """Of vectors."""
    reach: int
    eps: float
    bias: bool
    layers: tuple[LayerArgs, ...]

    @classmethod
    def from_dict(cls, composite: Mapping[str, Any]) -> ModelArgs:
        """Raises `ModelUnusable`, and `KeyError` for a size that is missing."""
        config = composite.get("text_config") or composite
        require(config, COMPUTED)
        return cls(
            vocabulary=config["vocab_size"],
            width=config["hidden_size"],
            inner=config["intermediate_size"],
            side_width=config["hidden_size_per_layer_input"],
            dimensions=config["embedding_dim"],
            reach=config["sliding_window"],
            eps=config.get("rms_norm_eps", 1e-6),
            bias=config.get("attention_bias", False),
            layers=tuple(_layers(config)),
        )

    def norm(self, width: int | None = None) -> nn.RMSNorm:
        return nn.RMSNorm(width or self.width, eps=self.eps)

    def linear(self, inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=bias)


def _layers(config: Mapping[str, Any]) -> list[LayerArgs]:
    layers = list[LayerArgs]()
    # Keys are numbers of layers, as texts that may begin with 0.
    others = {int(key): sizes for key, sizes in (config.get("per_layer_config") or {}).items()}
    for index, kind in enumerate(config["layer_types"][: config["num_hidden_layers"]]):
        heads, kv_heads, dim = (others.get(index, {}).get(name, config[name]) for name in SIZES)
        rope = config["rope_parameters"][kind]
        if rope.get("rope_type", "default") != "default":
            raise ModelUnusable(f"rope_parameters of the type {rope['rope_type']} is not computed")
        layers.append(
            LayerArgs(
                heads=heads,
                kv_heads=kv_heads,
                head_dim=dim,
                windowed=kind == SLIDING,
                base=rope["rope_theta"],
            )
        )
    return layers


class Attention(nn.Module):
    def __init__(self, args: ModelArgs, layer: LayerArgs) -> None:
        super().__init__()
        queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        self.q_proj = args.linear(args.width, queries, bias=args.bias)
        self.k_proj = args.linear(args.width, keys, bias=args.bias)
        self.v_proj = args.linear(args.width, keys, bias=args.bias)
        self.o_proj = args.linear(queries, args.width, bias=args.bias)
        self.q_norm, self.k_norm = args.norm(layer.head_dim), args.norm(layer.head_dim)
        self._rope = nn.RoPE(layer.head_dim, base=layer.base)
        self._layer, self._eps = layer, args.eps

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        queries = heads_of(self.q_proj(x), self._layer.heads)
        keys = heads_of(self.k_proj(x), self._layer.kv_heads)
        values = heads_of(self.v_proj(x), self._layer.kv_heads)
        queries, keys = self._rope(self.q_norm(queries)), self._rope(self.k_norm(keys))
        values = mx.fast.rms_norm(values, None, self._eps)
        return self.o_proj(attend(queries, keys, values, mask, scale=1.0))


class GatedMlp(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.gate_proj = args.linear(args.width, args.inner)
        self.up_proj = args.linear(args.width, args.inner)
        self.down_proj = args.linear(args.inner, args.width)
        self._activation = activation("gelu_pytorch_tanh")

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))


class SideInputs(nn.Module):
    """One gate for each layer (rows, tokens, layers, side width), from the embeddings alone."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        outputs = len(args.layers) * args.side_width
        self.per_layer_model_projection = args.linear(args.width, outputs)
        self.per_layer_projection_norm = args.norm(args.side_width)
        self._shape, self._scale = (len(args.layers), args.side_width), args.width**-0.5

    def __call__(self, x: mx.array) -> mx.array:
        projected = self.per_layer_model_projection(x) * self._scale
        return self.per_layer_projection_norm(projected.reshape(*x.shape[:-1], *self._shape))


class SideBlock(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.per_layer_input_gate = args.linear(args.width, args.side_width)
        self.per_layer_projection = args.linear(args.side_width, args.width)
        self.post_per_layer_input_norm = args.norm()
        self._activation = activation("gelu_pytorch_tanh")

    def __call__(self, x: mx.array, side: mx.array) -> mx.array:
        gated = self._activation(self.per_layer_input_gate(x)) * side
        return x + self.post_per_layer_input_norm(self.per_layer_projection(gated))


class Layer(nn.Module):
    def __init__(self, args: ModelArgs, layer: LayerArgs) -> None:
        super().__init__()
        self.windowed = layer.windowed
        self.self_attn = Attention(args, layer)
        self.mlp = GatedMlp(args)
        self.ple_block = SideBlock(args)
        self.input_layernorm, self.post_attention_layernorm = args.norm(), args.norm()
        self.pre_feedforward_layernorm = args.norm()
        self.post_feedforward_layernorm = args.norm()
        self.layer_scalar = mx.ones((1,))

    def __call__(self, x: mx.array, mask: mx.array | None, side: mx.array) -> mx.array:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), mask))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return self.ple_block(x, side) * self.layer_scalar


class Model(Encoder):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocabulary, args.width)
        self.ple = SideInputs(args)
        self.layers = [Layer(args, layer) for layer in args.layers]
        self.norm = args.norm()
        self.embedding_projection = args.linear(args.width, args.dimensions)
        self.vocabulary = args.vocabulary
        self._scale, self._reach = sqrt(args.width), args.reach

    def __call__(
        self,
        tokens: mx.array,
        types: mx.array,  # noqa: ARG002
        mask: mx.array | None,
    ) -> mx.array:
        x = self.embed_tokens(tokens)
        # As in the reference, the scale has the weights' type.
        x = x * mx.array(self._scale, x.dtype)
        sides, padding = self.ple(x), padding_mask(mask)
        window = window_mask(tokens.shape[1], self._reach, padding)
        for index, layer in enumerate(self.layers):
            x = layer(x, window if layer.windowed else padding, sides[:, :, index])
        return self.embedding_projection(self.norm(x))

    def sanitize(self, weights: Weights) -> Weights:
        return without(weights, PREFIXES, UNUSED)
