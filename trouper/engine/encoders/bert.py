"""BERT, RoBERTa, XLM-RoBERTa, MPNet and DistilBERT, as embedders and cross-encoders.

Names of weights are those of BERT in transformers (models/bert); sanitizing also takes those of
models/mpnet and models/distilbert, the old names of norms, and those of Jina's XLM-RoBERTa with
flash attention.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

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

BUCKETS, FARTHEST = 32, 128
"""Of relative positions, in MPNet."""
COMPUTED = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "relative_attention_num_buckets": (BUCKETS,),
}
PREFIXES = ("bert.", "roberta.", "mpnet.", "distilbert.", "model.")
UNUSED = ("cls.", "lm_head.", "vocab_", "embeddings.position_ids", "embeddings.token_type_ids")
CLASSIFIERS, POOLER = ("classifier.", "pre_classifier."), "pooler."
OTHER_NAMES = (
    (re.compile(r"^emb_ln\."), "embeddings.LayerNorm."),
    (re.compile(r"^encoder\.layers\."), "encoder.layer."),
    (re.compile(r"\.mixer\.out_proj\."), ".attention.output.dense."),
    (re.compile(r"\.norm1\."), ".attention.output.LayerNorm."),
    (re.compile(r"\.mlp\.fc1\."), ".intermediate.dense."),
    (re.compile(r"\.mlp\.fc2\."), ".output.dense."),
    (re.compile(r"\.norm2\."), ".output.LayerNorm."),
    (re.compile(r"\.attention\.(attn\.q|q_lin)\."), ".attention.self.query."),
    (re.compile(r"\.attention\.(attn\.k|k_lin)\."), ".attention.self.key."),
    (re.compile(r"\.attention\.(attn\.v|v_lin)\."), ".attention.self.value."),
    (re.compile(r"\.attention\.(attn\.o|out_lin)\."), ".attention.output.dense."),
    (re.compile(r"\.(attention\.LayerNorm|sa_layer_norm)\."), ".attention.output.LayerNorm."),
    (re.compile(r"^transformer\."), "encoder."),
    (re.compile(r"\.ffn\.lin1\."), ".intermediate.dense."),
    (re.compile(r"\.ffn\.lin2\."), ".output.dense."),
    (re.compile(r"\.output_layer_norm\."), ".output.LayerNorm."),
    (re.compile(r"\.LayerNorm\.gamma$"), ".LayerNorm.weight"),
    (re.compile(r"\.LayerNorm\.beta$"), ".LayerNorm.bias"),
)
"""Names of weights by others, and ours."""
JOINED = ".mixer.Wqkv."
MATRICES = ("query", "key", "value")


@attrs.frozen(kw_only=True)
class ModelArgs:
    vocabulary: int
    width: int
    layers: int
    heads: int
    inner: int
    positions: int
    types: int
    eps: float
    activation: str
    padding: int | None
    """Token before whose successor positions begin, in RoBERTa and MPNet; None: at 0."""
    relative: bool
    """Whether scores get a bias by the distance of tokens, in MPNet."""
    head: str | None
    """`model_type` of a cross-encoder, by which its head differs."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelArgs:
        """Raises `ModelUnusable`, and `KeyError` for a size that is missing."""
        require(config, COMPUTED)
        kind = config["model_type"]

        def size(name: str, of_distilbert: str) -> int:
            return int(config[of_distilbert if kind == "distilbert" else name])

        return cls(
            vocabulary=config["vocab_size"],
            width=size("hidden_size", "dim"),
            layers=size("num_hidden_layers", "n_layers"),
            heads=size("num_attention_heads", "n_heads"),
            inner=size("intermediate_size", "hidden_dim"),
            positions=config["max_position_embeddings"],
            types=0 if kind in ("mpnet", "distilbert") else config.get("type_vocab_size", 2),
            eps=config.get("layer_norm_eps", 1e-12),
            activation=config.get("hidden_act", config.get("activation", "gelu")),
            padding=_padding(config),
            relative=kind == "mpnet",
            head=kind if is_cross_encoder(config) else None,
        )


def _padding(config: Mapping[str, Any]) -> int | None:
    match config["model_type"]:
        case "bert" | "distilbert":
            return None
        case "mpnet":
            return 1
    padding = config.get("pad_token_id")
    return 1 if padding is None else padding


class Embeddings(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(args.vocabulary, args.width)
        self.position_embeddings = nn.Embedding(args.positions, args.width)
        if args.types:
            self.token_type_embeddings = nn.Embedding(args.types, args.width)
        self.LayerNorm = nn.LayerNorm(args.width, eps=args.eps)
        self._padding, self._types = args.padding, args.types

    def __call__(self, tokens: mx.array, types: mx.array) -> mx.array:
        if self._padding is None:
            positions = mx.arange(tokens.shape[1])[None]
        else:
            counted = (tokens != self._padding).astype(mx.int32)
            positions = mx.cumsum(counted, axis=1) * counted + self._padding
        summed = self.word_embeddings(tokens) + self.position_embeddings(positions)
        if self._types:
            # XLM-RoBERTa has one type for both texts of a pair.
            summed = summed + self.token_type_embeddings(mx.minimum(types, self._types - 1))
        return self.LayerNorm(summed)


class SelfAttention(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        for name in MATRICES:
            self[name] = nn.Linear(args.width, args.width)
        self._heads = args.heads

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        queries, keys, values = (heads_of(self[name](x), self._heads) for name in MATRICES)
        return attend(queries, keys, values, mask)


class Output(nn.Module):
    def __init__(self, inputs: int, args: ModelArgs) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, args.width)
        self.LayerNorm = nn.LayerNorm(args.width, eps=args.eps)

    def __call__(self, x: mx.array, residual: mx.array) -> mx.array:
        return self.LayerNorm(self.dense(x) + residual)


class Attention(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self["self"] = SelfAttention(args)
        self.output = Output(args.width, args)

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        return self.output(self["self"](x, mask), x)


class Layer(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.intermediate = Dense(args.width, args.inner)
        self.output = Output(args.inner, args)
        self._activation = activation(args.activation)

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        x = self.attention(x, mask)
        return self.output(self._activation(self.intermediate.dense(x)), x)


class Layers(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.layer = [Layer(args) for _ in range(args.layers)]
        if args.relative:
            self.relative_attention_bias = nn.Embedding(BUCKETS, args.heads)

    def mask(self, width: int, padding: mx.array | None) -> mx.array | None:
        """`padding` (rows, 1, 1, width), or with MPNet's bias, to be added, (rows or 1, heads,
        width, width)."""
        if "relative_attention_bias" not in self:
            return padding
        bias = self.relative_attention_bias(mx.array(_buckets(width))).transpose(2, 0, 1)[None]
        return bias if padding is None else mx.where(padding, bias, -mx.inf)


def _buckets(width: int) -> NDArray[np.int64]:
    """Of queries and keys (width, width): T5's, half of them for keys behind the query, and of
    these half for single distances."""
    at = np.arange(width)
    distance = at[None] - at[:, None]
    half, single = BUCKETS // 2, BUCKETS // 4
    far = np.log2(np.maximum(abs(distance), 1) / single) / np.log2(FARTHEST / single)
    bucket = np.minimum(single + (far * (half - single)).astype(np.int64), half - 1)
    return np.where(abs(distance) < single, abs(distance), bucket) + half * (distance > 0)


class RobertaHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, 1)

    def __call__(self, first: mx.array) -> mx.array:
        return self.out_proj(mx.tanh(self.dense(first)))


class Model(Encoder):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embeddings = Embeddings(args)
        self.encoder = Layers(args)
        self.vocabulary, self.scores = args.vocabulary, args.head is not None
        self._unused = UNUSED if self.scores else (*UNUSED, *CLASSIFIERS)
        if args.head != "bert":
            self._unused = (*self._unused, POOLER)
        match args.head:
            case "bert":
                self.pooler = Dense(args.width, args.width)
                self.classifier = nn.Linear(args.width, 1)
            case "distilbert":
                self.pre_classifier = nn.Linear(args.width, args.width)
                self.classifier = nn.Linear(args.width, 1)
            case str():
                self.classifier = RobertaHead(args.width)

    def __call__(self, tokens: mx.array, types: mx.array, mask: mx.array | None) -> mx.array:
        x = self.embeddings(tokens, types)
        attended = self.encoder.mask(tokens.shape[1], padding_mask(mask))
        for layer in self.encoder.layer:
            x = layer(x, attended)
        return x

    def score(self, hidden: mx.array) -> mx.array:
        first = hidden[0]
        if "pooler" in self:
            first = mx.tanh(self.pooler.dense(first))
        elif "pre_classifier" in self:
            first = nn.relu(self.pre_classifier(first))
        return self.classifier(first)

    def sanitize(self, weights: Weights) -> Weights:
        named = renamed(without(weights, PREFIXES, self._unused), OTHER_NAMES)
        return split(named, JOINED, [f".attention.self.{name}." for name in MATRICES])
