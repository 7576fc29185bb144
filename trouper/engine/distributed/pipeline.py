"""Pipeline parallelism: each rank has consecutive layers, and sends hidden states to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from trouper.engine.distributed.rank_group import RankGroup
from trouper.engine.kv.model_body import body_of
from trouper.engine.passes.seams import Seams
from trouper.engine.platform.error_text import first_line_of
from trouper.protocol.problems import ModelUnusable
from trouper.workarounds.mlx_call_hooks import extend_module

# Rank 0 has the last layers (as in mlx-lm's pipelines), and hence the logits: its tokens are
# everybody's (`RankGroup.agree`). Other ranks apply norm and head to what they have sent, and
# nobody uses the result.


FAMILIES = frozenset(
    {
        "deepseek_v3",
        "gemma2",
        "kimi_k25",
        "llama",
        "mixtral",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
    }
)
"""mlx-lm's modules whose layers compute alike wherever the list of layers begins
(tests/engine/test_pipeline.py)."""


class FirstLayer:
    """Mixin: ignores the embeddings."""

    seams: Seams

    def __call__(self, x: mx.array, *args: Any, **options: Any) -> Any:
        call: Any = super()
        return call.__call__(self.seams.receive(x), *args, **options)


class LastLayer:
    """Mixin."""

    seams: Seams

    def __call__(self, x: mx.array, *args: Any, **options: Any) -> Any:
        call: Any = super()
        return self.seams.send(call.__call__(x, *args, **options), x)


def keep_stage(model: nn.Module, directory: Path, group: RankGroup) -> None:
    """Remove all layers but this rank's. Raises `ModelUnusable`."""
    family, layers = type(model).__module__.rsplit(".", 1)[-1], _layers_of(model)
    if family not in FAMILIES or layers is None:
        raise ModelUnusable(
            f"{directory}: --pipeline is for {', '.join(sorted(FAMILIES))}, with attention to all "
            f"tokens in each layer; leave it out, and {family} is split by heads if it can be"
        )
    count, size = len(layers), group.size
    if count % size:
        counts = [str(ranks) for ranks in range(2, count + 1) if count % ranks == 0]
        raise ModelUnusable(
            f"{directory}: its {count} layers do not divide by {size}; --pipeline runs at "
            f"{', '.join(counts)} ranks"
        )
    stage = size - 1 - group.rank
    layers[:] = layers[stage * count // size : (stage + 1) * count // size]
    model.seams = seams = Seams(group.mlx)
    try:
        if stage > 0:
            _extend(layers[0], FirstLayer, seams)
        if stage < size - 1:
            _extend(layers[-1], LastLayer, seams)
        model(mx.array([[0, 1]]), cache=make_prompt_cache(model))
    except Exception as error:
        # Any architecture's code with fewer layers.
        raise ModelUnusable(
            f"{directory} cannot be a pipeline: {first_line_of(error)}; leave --pipeline out"
        ) from error


def _layers_of(model: nn.Module) -> list[nn.Module] | None:
    """The list of layers, each of which has plain KV."""
    layers = getattr(body_of(model), "layers", None)
    caches = make_prompt_cache(model)
    plain = all(type(cache) is KVCache for cache in caches)
    return layers if plain and isinstance(layers, list) and len(layers) == len(caches) else None


def _extend(layer: nn.Module, mixin: type, seams: Seams) -> None:
    extend_module(layer, mixin)
    layer.seams = seams
