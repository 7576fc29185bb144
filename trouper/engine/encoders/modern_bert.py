"""ModernBERT, as embedder (gte-modernbert, nomic's modernbert-embed) and cross-encoder.

Paper: https://arxiv.org/abs/2412.13663. Names of weights are those of transformers
(models/modernbert).
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
    window_mask,
    without,
)

COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "classifier_pooling": ("cls", "mean"),
    "rope_scaling": (None,),
}
PREFIXES = ("model.",)
UNUSED = ("decoder.",)
HEADS = ("head.", "classifier.")
SLIDING = "sliding_attention"


@attrs.frozen(kw_only=True)
class ModelArgs:
    vocabulary: int
    width: int
    heads: int
    inner: int
    windowed: tuple[bool, ...]
    """By layer."""
    reach: int
    """Greatest distance of tokens that see each other in a layer with a window."""
    base: float
    windowed_base: float
    eps: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    activation: str
    scores: bool
    head_bias: bool
    head_activation: str
    head_pooling: str

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelArgs:
        """Raises `ModelUnusable`, and `KeyError` for a size that is missing."""
        require(config, COMPUTED)
        kinds, period = config.get("layer_types"), config.get("global_attn_every_n_layers", 3)
        layers = config["num_hidden_layers"]
        return cls(
            vocabulary=config["vocab_size"],
            width=config["hidden_size"],
            heads=config["num_attention_heads"],
            inner=config["intermediate_size"],
            windowed=tuple(
                bool(layer % period) if kinds is None else kinds[layer] == SLIDING
                for layer in range(layers)
            ),
            reach=config.get("local_attention", 128) // 2,
            base=config.get("global_rope_theta", config.get("rope_theta", 160000.0)),
            windowed_base=config.get(
                "local_rope_theta", config.get("rope_local_base_freq", 10000.0)
            ),
            eps=config.get("norm_eps", 1e-5),
            norm_bias=config.get("norm_bias", False),
            attention_bias=config.get("attention_bias", False),
            mlp_bias=config.get("mlp_bias", False),
            activation=config.get("hidden_activation", "gelu"),
            scores=is_cross_encoder(config),
            head_bias=config.get("classifier_bias", False),
            head_activation=config.get("classifier_activation", "gelu"),
            head_pooling=config.get("classifier_pooling", "cls"),
        )

    def norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.width, eps=self.eps, bias=self.norm_bias)


class Embeddings(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocabulary, args.width)
        self.norm = args.norm()

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.norm(self.tok_embeddings(tokens))


class Attention(nn.Module):
    def __init__(self, args: ModelArgs, *, windowed: bool) -> None:
        super().__init__()
        self.Wqkv = nn.Linear(args.width, 3 * args.width, bias=args.attention_bias)
        self.Wo = nn.Linear(args.width, args.width, bias=args.attention_bias)
        self._heads = args.heads
        base = args.windowed_base if windowed else args.base
        self._rope = nn.RoPE(args.width // args.heads, base=base)

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        queries, keys, values = (
            heads_of(each, self._heads) for each in mx.split(self.Wqkv(x), 3, axis=-1)
        )
        return self.Wo(attend(self._rope(queries), self._rope(keys), values, mask))


class GatedMlp(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.Wi = nn.Linear(args.width, 2 * args.inner, bias=args.mlp_bias)
        self.Wo = nn.Linear(args.inner, args.width, bias=args.mlp_bias)
        self._activation = activation(args.activation)

    def __call__(self, x: mx.array) -> mx.array:
        inner, gate = mx.split(self.Wi(x), 2, axis=-1)
        return self.Wo(self._activation(inner) * gate)


class Layer(nn.Module):
    def __init__(self, args: ModelArgs, index: int) -> None:
        super().__init__()
        self._windowed = args.windowed[index]
        # The embeddings' norm is that of the first layer.
        self.attn_norm = args.norm() if index else nn.Identity()
        self.attn = Attention(args, windowed=self._windowed)
        self.mlp_norm = args.norm()
        self.mlp = GatedMlp(args)

    def __call__(self, x: mx.array, mask: mx.array | None, window: mx.array | None) -> mx.array:
        x = x + self.attn(self.attn_norm(x), window if self._windowed else mask)
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.dense = nn.Linear(args.width, args.width, bias=args.head_bias)
        self.norm = args.norm()
        self._activation = activation(args.head_activation)

    def __call__(self, pooled: mx.array) -> mx.array:
        return self.norm(self._activation(self.dense(pooled)))


class Model(Encoder):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embeddings = Embeddings(args)
        self.layers = [Layer(args, index) for index in range(len(args.windowed))]
        self.final_norm = args.norm()
        self.vocabulary, self.scores = args.vocabulary, args.scores
        self._reach, self._pooling = args.reach, args.head_pooling
        if args.scores:
            self.head = Head(args)
            self.classifier = nn.Linear(args.width, 1)

    def __call__(
        self,
        tokens: mx.array,
        types: mx.array,  # noqa: ARG002
        mask: mx.array | None,
    ) -> mx.array:
        x = self.embeddings(tokens)
        padding = padding_mask(mask)
        window = self._window(tokens.shape[1], padding)
        for layer in self.layers:
            x = layer(x, padding, window)
        return self.final_norm(x)

    def _window(self, width: int, padding: mx.array | None) -> mx.array | None:
        """The mask of layers with a window: broadcastable to (rows, 1, width, width)."""
        if width <= self._reach + 1:
            return padding
        return window_mask(width, self._reach, padding)

    def score(self, hidden: mx.array) -> mx.array:
        pooled = hidden[0] if self._pooling == "cls" else hidden.mean(0)
        return self.classifier(self.head(pooled))

    def sanitize(self, weights: Weights) -> Weights:
        return without(weights, PREFIXES, UNUSED if self.scores else (*UNUSED, *HEADS))
