"""An architecture that mlx-lm does not have, as a plugin: Llama whose attention and MLP read the
same input, as in GPT-J.

The interface is that of a module of mlx_lm.models: `Model` and `ModelArgs`. `Model` may have
`sanitize(weights)`, which names the weights of a checkpoint, and `make_cache()`, which makes the
caches of one row. With mlx-lm's own classes of caches rows can be batched.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import llama

Weights = dict[str, mx.array]


class ModelArgs(llama.ModelArgs):
    """The keys of config.json that matter: those of Llama."""


class ParallelBlock(llama.TransformerBlock):
    """A layer with one norm: attention and MLP are added to its input together."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        del self.post_attention_layernorm

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """x: (rows, tokens, hidden_size)."""
        inputs = self.input_layernorm(x)
        return x + self.self_attn(inputs, mask, cache) + self.mlp(inputs)


class Model(llama.Model):
    """The whole model: tokens (rows, tokens) to logits (rows, tokens, vocabulary)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.model.layers = [ParallelBlock(args) for _ in range(args.num_hidden_layers)]

    def sanitize(self, weights: Weights) -> Weights:
        """Name weights as this module does. Here checkpoints call the norm of a layer `norm`."""
        named = {
            name.replace(".norm.weight", ".input_layernorm.weight")
            if ".layers." in name
            else name: weight
            for name, weight in weights.items()
        }
        sanitize: Any = super().sanitize  # mlx-lm's methods have no types.
        return dict(sanitize(named))
