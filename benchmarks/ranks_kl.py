"""What splitting does to a bfloat16 model's answers: mean KL against one rank. `python -m
benchmarks.ranks_kl`.

For each number of ranks: parts added in the model's own type (--tp-reduce-dtype native), in float32
(float32), and, to see what is left to gain, products and sums both in float32, which no server
would pay for. For scale, what bfloat16 itself does: one rank in bfloat16 against one in float32.
The same tokens for all: English, as many as asked for.

Where heads do not divide, a model of mlx-lm's llama gets heads of zeros, which add nothing: so the
embedded one, with its 9 heads and 3 KV heads, is split over two ranks, too. A server refuses that:
those heads would cost as much as others.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers.distributed import ShardedToAllLinear
from mlx.utils import tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.kv_bits import log_softmax, text
from benchmarks.starting import run_ranks
from trouper.engine.distributed.rank_group import RankGroup, join
from trouper.engine.distributed.sharding import fault, sum_in_float32
from trouper.engine.loading.model_loading import load
from trouper.protocol.settings import Settings

CHUNK = 64


class Float32Part(nn.Module):
    """Products and sums in float32, rounded once."""

    def __init__(self, layer: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.weight = layer.weight
        self._group = group

    def __call__(self, x: mx.array) -> mx.array:
        part = x.astype(mx.float32) @ self.weight.T.astype(mx.float32)
        return self._group.sum(part).astype(x.dtype)


def products_in_float32(model: nn.Module, group: RankGroup) -> None:
    layers = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, ShardedToAllLinear)
    ]
    model.update_modules(
        tree_unflatten([(name, Float32Part(layer, group)) for name, layer in layers])
    )


def with_heads_of_zeros(model: nn.Module, config: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """So many that they divide by the ranks; the config that says so."""
    kv_heads, heads = config["num_key_value_heads"], config["num_attention_heads"]
    more = -kv_heads % ranks
    if not more or config["model_type"] != "llama":
        return dict(config)
    for attention in (layer.self_attn for layer in model.layers):
        dim, queries = attention.head_dim, more * (heads // kv_heads)
        for name, zeros in (("q_proj", queries), ("k_proj", more), ("v_proj", more)):
            layer = getattr(attention, name)
            layer.weight = mx.pad(layer.weight, [(0, zeros * dim), (0, 0)])
        attention.o_proj.weight = mx.pad(attention.o_proj.weight, [(0, 0), (0, queries * dim)])
        attention.n_heads += queries
        attention.n_kv_heads += more
    return {
        **config,
        "num_attention_heads": heads + queries,
        "num_key_value_heads": kv_heads + more,
    }


SUMS: dict[str, Callable[[nn.Module, RankGroup], None]] = {
    "native": lambda _, __: None,
    "float32": sum_in_float32,
    "float32 products, too": products_in_float32,
}


def rank() -> None:
    """One rank: log-probabilities of every token, into a file of rank 0's."""
    source, count, dtype, sums, target = sys.argv[2:]
    group = join()
    loaded = load(Settings(model=source or None, no_ssd=True), lambda _: None)
    model = loaded.model
    model.set_dtype(getattr(mx, dtype))
    if group.size > 1:
        config = with_heads_of_zeros(model, loaded.config, group.size)
        if (wrong := fault(model, config, group.mlx)) is not None:
            sys.exit(wrong)
        SUMS[sums](model, group)
    mx.eval(model.parameters())
    tokens = loaded.tokenizer.encode(text())[: int(count)]
    cache, said = make_prompt_cache(model), []
    for first in range(0, len(tokens), CHUNK):
        said.append(log_softmax(model(mx.array([tokens[first : first + CHUNK]]), cache=cache)))
        mx.eval(said, [layer.state for layer in cache])
    if group.leads:
        np.save(target, np.array(mx.concatenate(said, 1)[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="Nothing: the embedded model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--backend", default="ring")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:

        def logprobs(ranks: int, dtype: str, sums: str = "native") -> np.ndarray:
            target = Path(scratch) / f"{ranks} {dtype} {sums}.npy"
            arguments = [
                "benchmarks.ranks_kl",
                "rank",
                options.model,
                str(options.tokens),
                dtype,
                sums,
                str(target),
            ]
            run_ranks(ranks, options.backend, arguments)
            return np.load(target)

        whole = logprobs(1, "bfloat16")
        print(
            f"| {options.model or 'SmolLM2-135M-Instruct'}, {len(whole)} tokens | mean KL | same "
            "best token |"
        )
        print("|---|---|---|")
        tell("one rank, bfloat16 against float32", logprobs(1, "float32"), whole)
        for ranks in options.ranks:
            for sums in SUMS:
                tell(f"{ranks} ranks, {sums}", whole, logprobs(ranks, "bfloat16", sums))


def tell(name: str, wanted: np.ndarray, got: np.ndarray) -> None:
    kl = (np.exp(wanted) * (wanted - got)).sum(-1).mean()
    print(f"| {name} | {kl:.2e} | {(wanted.argmax(-1) == got.argmax(-1)).mean():.1%} |", flush=True)


if __name__ == "__main__":
    rank() if sys.argv[1:2] == ["rank"] else main()
