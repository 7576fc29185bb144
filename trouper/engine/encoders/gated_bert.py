"""NomicBERT (nomic-embed-text v1 and v1.5).

Names of weights and config are those of its makers' own code (nomic-ai/nomic-bert-2048).
"""

from __future__ import annotations

from collections.abc import Mapping
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
    is_cross_encoder,
    padding_mask,
    require,
    without,
)
from trouper.protocol.problems import ModelUnusable

NO = (False, None)
COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu",),
    "hidden_act": ("silu",),
    "prenorm": NO,
    "use_rms_norm": NO,
    "parallel_block": NO,
    "rotary_emb_interleaved": NO,
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_scale_base": (None,),
    "rotary_scaling_factor": (None,),
    "num_experts": (0, 1, None),
    "moe_every_n_layers": (0, -1, None),
    "rope_scaling": (None,),
}
PREFIXES = ("bert.", "nomic_bert.")
UNUSED = ("cls.", "pooler.", "encoder.rotary_emb.")


@attrs.frozen(kw_only=True)
class ModelArgs:
    vocabulary: int
    width: int
    layers: int
    heads: int
    inner: int
    types: int
    eps: float
    base: float
    joined_bias: bool
    up_bias: bool
    down_bias: bool

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelArgs:
        """By its makers' names or transformers' own. Raises `ModelUnusable`, and `KeyError` for a
        size that is missing."""
        require(config, COMPUTED)
        if is_cross_encoder(config):
            raise ModelUnusable("cross-encoders of this architecture are not known")

        def size(name: str, other: str) -> int:
            return int(config[name if name in config else other])

        return cls(
            vocabulary=config["vocab_size"],
            width=size("n_embd", "hidden_size"),
            layers=size("n_layer", "num_hidden_layers"),
            heads=size("n_head", "num_attention_heads"),
            inner=size("n_inner", "intermediate_size"),
            types=config.get("type_vocab_size", 2),
            eps=config.get("layer_norm_epsilon", config.get("layer_norm_eps", 1e-12)),
            base=config.get("rotary_emb_base", config.get("rope_theta", 1000.0)),
            joined_bias=config.get("qkv_proj_bias", False),
            up_bias=config.get("mlp_fc1_bias", False),
            down_bias=config.get("mlp_fc2_bias", False),
        )


class Embeddings(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(args.vocabulary, args.width)
        if args.types:
            self.token_type_embeddings = nn.Embedding(args.types, args.width)
        self._types = args.types

    def __call__(self, tokens: mx.array, types: mx.array) -> mx.array:
        x: mx.array = self.word_embeddings(tokens)
        if not self._types:
            return x
        return x + self.token_type_embeddings(mx.minimum(types, self._types - 1))


class Attention(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.Wqkv = nn.Linear(args.width, 3 * args.width, bias=args.joined_bias)
        self.out_proj = nn.Linear(args.width, args.width, bias=args.joined_bias)
        self._heads = args.heads
        self._rope = nn.RoPE(args.width // args.heads, base=args.base)

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        queries, keys, values = (
            heads_of(each, self._heads) for each in mx.split(self.Wqkv(x), 3, axis=-1)
        )
        attended = attend(self._rope(queries), self._rope(keys), values, mask)
        return self.out_proj(attended)


class GatedMlp(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.fc11 = nn.Linear(args.width, args.inner, bias=args.up_bias)
        self.fc12 = nn.Linear(args.width, args.inner, bias=args.up_bias)
        self.fc2 = nn.Linear(args.inner, args.width, bias=args.down_bias)
        self._activation = activation("silu")

    def __call__(self, x: mx.array) -> mx.array:
        return self.fc2(self.fc11(x) * self._activation(self.fc12(x)))


class Layer(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attn = Attention(args)
        self.mlp = GatedMlp(args)
        self.norm1 = nn.LayerNorm(args.width, eps=args.eps)
        self.norm2 = nn.LayerNorm(args.width, eps=args.eps)

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        x = self.norm1(x + self.attn(x, mask))
        return self.norm2(x + self.mlp(x))


class Layers(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.layers = [Layer(args) for _ in range(args.layers)]


class Model(Encoder):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embeddings = Embeddings(args)
        self.emb_ln = nn.LayerNorm(args.width, eps=args.eps)
        self.encoder = Layers(args)
        self.vocabulary = args.vocabulary

    def __call__(self, tokens: mx.array, types: mx.array, mask: mx.array | None) -> mx.array:
        x = self.emb_ln(self.embeddings(tokens, types))
        padding = padding_mask(mask)
        for layer in self.encoder.layers:
            x = layer(x, padding)
        return x

    def sanitize(self, weights: Weights) -> Weights:
        return without(weights, PREFIXES, UNUSED)
