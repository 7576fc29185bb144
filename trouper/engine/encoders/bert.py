"""BERT, RoBERTa and XLM-RoBERTa, as embedders and cross-encoders.

Names of weights are those of transformers (models/bert, models/xlm_roberta); sanitizing also takes
the old names of norms, and those of Jina's XLM-RoBERTa with flash attention.
"""

from __future__ import annotations

import re
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

COMPUTED = {"position_embedding_type": ("absolute", None), "is_decoder": (False, None)}
PREFIXES = ("bert.", "roberta.", "model.")
UNUSED = ("cls.", "lm_head.", "embeddings.position_ids", "embeddings.token_type_ids")
CLASSIFIER, POOLER = "classifier.", "pooler."
OTHER_NAMES = (
    (re.compile(r"^emb_ln\."), "embeddings.LayerNorm."),
    (re.compile(r"^encoder\.layers\."), "encoder.layer."),
    (re.compile(r"\.mixer\.out_proj\."), ".attention.output.dense."),
    (re.compile(r"\.norm1\."), ".attention.output.LayerNorm."),
    (re.compile(r"\.mlp\.fc1\."), ".intermediate.dense."),
    (re.compile(r"\.mlp\.fc2\."), ".output.dense."),
    (re.compile(r"\.norm2\."), ".output.LayerNorm."),
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
    """Token before whose successor positions begin, in RoBERTa; None: at 0, in BERT."""
    scores: bool

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelArgs:
        """Raises `ModelUnusable`, and `KeyError` for a size that is missing."""
        require(config, COMPUTED)
        padding = config.get("pad_token_id")
        return cls(
            vocabulary=config["vocab_size"],
            width=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            inner=config["intermediate_size"],
            positions=config["max_position_embeddings"],
            types=config.get("type_vocab_size", 2),
            eps=config.get("layer_norm_eps", 1e-12),
            activation=config.get("hidden_act", "gelu"),
            padding=None if config["model_type"] == "bert" else (1 if padding is None else padding),
            scores=is_cross_encoder(config),
        )


class Embeddings(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(args.vocabulary, args.width)
        self.position_embeddings = nn.Embedding(args.positions, args.width)
        self.token_type_embeddings = nn.Embedding(args.types, args.width)
        self.LayerNorm = nn.LayerNorm(args.width, eps=args.eps)
        self._padding, self._types = args.padding, args.types

    def __call__(self, tokens: mx.array, types: mx.array) -> mx.array:
        if self._padding is None:
            positions = mx.arange(tokens.shape[1])[None]
        else:
            counted = (tokens != self._padding).astype(mx.int32)
            positions = mx.cumsum(counted, axis=1) * counted + self._padding
        # XLM-RoBERTa has one type for both texts of a pair.
        kind = self.token_type_embeddings(mx.minimum(types, self._types - 1))
        summed = self.word_embeddings(tokens) + self.position_embeddings(positions) + kind
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


class Dense(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)


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
        self.vocabulary, self.scores = args.vocabulary, args.scores
        self._unused = UNUSED if args.scores else (*UNUSED, CLASSIFIER)
        if not args.scores or args.padding is not None:
            self._unused = (*self._unused, POOLER)
        if args.scores and args.padding is None:
            self.pooler = Dense(args.width, args.width)
            self.classifier = nn.Linear(args.width, 1)
        elif args.scores:
            self.classifier = RobertaHead(args.width)

    def __call__(self, tokens: mx.array, types: mx.array, mask: mx.array | None) -> mx.array:
        x = self.embeddings(tokens, types)
        padding = padding_mask(mask)
        for layer in self.encoder.layer:
            x = layer(x, padding)
        return x

    def score(self, hidden: mx.array) -> mx.array:
        first = hidden[0]
        if "pooler" in self:
            first = mx.tanh(self.pooler.dense(first))
        return self.classifier(first)

    def sanitize(self, weights: Weights) -> Weights:
        named = Weights()
        for stored_name, weight in without(weights, PREFIXES, self._unused).items():
            name = stored_name
            for pattern, replacement in OTHER_NAMES:
                name = pattern.sub(replacement, name)
            if JOINED in name:
                for part, third in zip(MATRICES, mx.split(weight, 3), strict=True):
                    named[name.replace(JOINED, f".attention.self.{part}.")] = third
            else:
                named[name] = weight
        return named
