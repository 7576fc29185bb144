"""Encoders with rotary positions and gated MLPs: NomicBERT (nomic-embed-text v1 and v1.5) and GTE
(gte-base-en-v1.5, gte-multilingual-base and its reranker).

Names of weights and config are those of NomicBERT's makers (nomic-ai/nomic-bert-2048); sanitizing
also takes those of GTE's (Alibaba-NLP/new-impl) and of transformers (models/gte).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from trouper.engine.encoders.encoder import (
    Dense,
    Encoder,
    Weights,
    activation,
    attend,
    heads_of,
    is_cross_encoder,
    padding_mask,
    renamed,
    require,
    split,
    without,
)
from trouper.protocol.problems import ModelUnusable

NO = (False, None)
COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu",),
    "prenorm": NO,
    "use_rms_norm": NO,
    "parallel_block": NO,
    "rotary_emb_interleaved": NO,
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_scale_base": (None,),
    "rotary_scaling_factor": (None,),
    "num_experts": (0, 1, None),
    "moe_every_n_layers": (0, -1, None),
    "position_embedding_type": ("rope", "rotary", None),
    "layer_norm_type": ("layer_norm",),
    "logn_attention_scale": NO,
}
GTE = ("new", "gte")
"""`model_type` of its makers, and of transformers."""
PREFIXES = ("bert.", "nomic_bert.", "new.", "gte.")
UNUSED = ("cls.", "lm_head.", "encoder.rotary_emb.")
HEADS = ("pooler.", "classifier.")
OTHER_NAMES = (
    (re.compile(r"^embeddings\.LayerNorm\."), "emb_ln."),
    (re.compile(r"^(encoder\.layer|layers)\."), "encoder.layers."),
    (re.compile(r"\.(attention|self_attn)\."), ".attn."),
    (re.compile(r"\.qkv_proj\."), ".Wqkv."),
    (re.compile(r"\.o_proj\."), ".out_proj."),
    (re.compile(r"\.(attn_ln|post_attention_layernorm)\."), ".norm1."),
    (re.compile(r"\.(mlp_ln|post_mlp_layernorm)\."), ".norm2."),
    (re.compile(r"\.mlp\.up_proj\."), ".mlp.fc11."),
    (re.compile(r"\.mlp\.gate_proj\."), ".mlp.fc12."),
    (re.compile(r"\.mlp\.down_proj\."), ".mlp.fc2."),
)
"""Names of weights by others, and ours."""
JOINED, SEPARATE = ".Wqkv.", (".q_proj.", ".k_proj.", ".v_proj.")
UP_AND_GATE = ".up_gate_proj."


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
    scale: float
    """Of positions in rotary embeddings."""
    activation: str
    joined_bias: bool
    up_bias: bool
    down_bias: bool
    scores: bool

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelArgs:
        """By its makers' names or transformers' own. Raises `ModelUnusable`, and `KeyError` for a
        size that is missing."""
        require(config, COMPUTED)
        is_gte, scores = config["model_type"] in GTE, is_cross_encoder(config)
        if scores and not is_gte:
            raise ModelUnusable("cross-encoders of this architecture are not known")

        def size(name: str, other: str) -> int:
            return int(config[name if name in config else other])

        width, heads = size("n_embd", "hidden_size"), size("n_head", "num_attention_heads")
        base, scale = _rope(config, width // heads)
        return cls(
            vocabulary=config["vocab_size"],
            width=width,
            layers=size("n_layer", "num_hidden_layers"),
            heads=heads,
            inner=size("n_inner", "intermediate_size"),
            types=config.get("type_vocab_size", 2),
            eps=config.get("layer_norm_epsilon", config.get("layer_norm_eps", 1e-12)),
            base=base,
            scale=scale,
            activation=config.get("hidden_act", "gelu" if is_gte else "silu"),
            joined_bias=is_gte or config.get("qkv_proj_bias", False),
            up_bias=config.get("mlp_fc1_bias", False),
            down_bias=is_gte or config.get("mlp_fc2_bias", False),
            scores=scores,
        )


def _rope(config: Mapping[str, Any], dim: int) -> tuple[float, float]:
    """Base of the frequencies, and scale of positions. Raises `ModelUnusable` for a scaling that is
    not computed."""
    # transformers 5 writes `rope_parameters`, and the theta into it.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    default = 160_000.0 if config["model_type"] in GTE else 1000.0
    named = config.get("rotary_emb_base", config.get("rope_theta", default))
    base, factor = float(rope.get("rope_theta", named)), float(rope.get("factor") or 1)
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return base, 1.0
        case "linear":
            return base, 1 / factor
        case "ntk" if rope.get("mixed_b") is None:
            # https://kexue.fm/archives/9706, equation 6.
            return base * factor, factor ** (-2 / dim)
        case kind:
            raise ModelUnusable(f"rope_scaling of the type {kind} is not computed here")


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
        self._rope = nn.RoPE(args.width // args.heads, base=args.base, scale=args.scale)

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
        self._activation = activation(args.activation)

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
        self.vocabulary, self.scores = args.vocabulary, args.scores
        if args.scores:
            self.pooler = Dense(args.width, args.width)
            self.classifier = nn.Linear(args.width, 1)

    def __call__(self, tokens: mx.array, types: mx.array, mask: mx.array | None) -> mx.array:
        x = self.emb_ln(self.embeddings(tokens, types))
        padding = padding_mask(mask)
        for layer in self.encoder.layers:
            x = layer(x, padding)
        return x

    def score(self, hidden: mx.array) -> mx.array:
        return self.classifier(mx.tanh(self.pooler.dense(hidden[0])))

    def sanitize(self, weights: Weights) -> Weights:
        unused = UNUSED if self.scores else (*UNUSED, *HEADS)
        named = renamed(without(weights, PREFIXES, unused), OTHER_NAMES)
        named = split(named, UP_AND_GATE, (".fc11.", ".fc12."))
        first = SEPARATE[0]
        for name in [each for each in named if first in each]:
            separate = [named.pop(name.replace(first, part)) for part in SEPARATE]
            named[name.replace(first, JOINED)] = mx.concatenate(separate)
        return named
