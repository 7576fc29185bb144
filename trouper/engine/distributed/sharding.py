"""Sharding by mlx-lm's `shard`, preconditions, and sums of parts. Lazy: a rank only reads the
rank's own part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
from mlx import nn
from mlx.nn.layers.distributed import QuantizedShardedToAllLinear, ShardedToAllLinear
from mlx_lm.models.cache import make_prompt_cache

from trouper.engine.distributed.rank_group import RankGroup
from trouper.engine.platform.error_text import first_line_of
from trouper.engine.products.linear_layers import replace_layers
from trouper.protocol.problems import ModelUnusable

HEADS = {
    "num_attention_heads": "heads",
    "linear_num_key_heads": "linear key heads",
    "linear_num_value_heads": "linear value heads",
}
KV_HEADS = "num_key_value_heads"
REPEATS_KV_HEADS = frozenset({"qwen3_5", "qwen3_5_moe"})
"""Model types whose `shard` copies KV heads for more ranks than heads."""
MAX_RANKS = 64  # Ranks tried for the error message.
Make = Callable[[], nn.Module]  # `shard` works in place.


def shard(
    model: nn.Module, config: Mapping[str, Any], directory: Path, group: RankGroup, make: Make
) -> None:
    """Raises `ModelUnusable`."""
    if not hasattr(_splittable(model), "shard"):
        raise ModelUnusable(
            f"{directory}: mlx-lm cannot split {config['model_type']} over ranks; run it in one "
            "process, without a launcher"
        )
    reason = fault(model, config, group.mlx) or _misfit(model)
    if reason is None:
        return
    counts = [
        count
        for count in range(2, MAX_RANKS + 1)
        if count != group.size and _can_shard(count, config, make)
    ]
    remedy = f"it runs at 1, {', '.join(map(str, counts))}" if counts else "it runs only at 1"
    raise ModelUnusable(f"{directory} cannot be split over {group.size} ranks: {reason}; {remedy}")


def fault(model: nn.Module, config: Mapping[str, Any], group: Any) -> str | None:
    """Return the reason against sharding, or None. `group` has a size and a rank."""
    count = group.size()
    for heads, name in _heads(config):
        if heads % count:
            return f"its {heads} {name} do not divide by {count}"
    try:
        _splittable(model).shard(group)
    except Exception as error:  # noqa: BLE001
        # Any architecture's code over any sizes: it is the answer.
        return first_line_of(error)
    return None


def _splittable(model: nn.Module) -> Any:
    """The model, or the text model in it: mlx-lm splits Qwen3, but not Qwen3 in Qwen3-VL."""
    inner = getattr(model, "language_model", None)
    return model if hasattr(model, "shard") or inner is None else inner


def _misfit(model: nn.Module) -> str | None:
    """Return the reason why a pass fails, or None. Evaluates nothing."""
    try:
        model(mx.array([[0, 1]]), cache=make_prompt_cache(model))
    except Exception as error:  # noqa: BLE001 - as above
        return first_line_of(error)
    return None


def _can_shard(count: int, config: Mapping[str, Any], make: Make) -> bool:
    return (
        all(heads % count == 0 for heads, _ in _heads(config))
        and fault(make(), config, HypotheticalGroup(count)) is None
    )


@attrs.frozen
class HypotheticalGroup:
    count: int

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return 0


def _heads(config: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    for level in (config, config.get("text_config") or {}):
        for key, name in HEADS.items():
            if isinstance(heads := level.get(key), int):
                yield heads, name
        replicated = (
            config["model_type"] in REPEATS_KV_HEADS or level.get("kv_lora_rank") is not None
        )
        if isinstance(heads := level.get(KV_HEADS), int) and not replicated:
            yield heads, "KV heads"


# -- adapters ------------------------------------------------------------------------------------


def fuse_adapters(model: nn.Module) -> None:
    """mlx-lm shards only plain layers. Quantized layers are dequantized, lest the adapter's small
    steps be lost."""
    fused = {
        path: layer.fuse(dequantize=True)
        for path, layer in model.named_modules()
        if hasattr(layer, "fuse")
    }
    replace_layers(model, fused)


# -- sums ----------------------------------------------------------------------------------------


class Float32Sum(nn.Module):
    """A layer split along the input, with parts added in float32 and rounded once (F26); mlx-lm
    rounds at each addition."""

    def __init__(self, layer: nn.Module, group: RankGroup) -> None:
        super().__init__()
        for name, parameter in layer.parameters().items():
            self[name] = parameter
        self._packing = {
            key: getattr(layer, key)
            for key in ("group_size", "bits", "mode")
            if hasattr(layer, key)
        }
        self._group = group

    def __call__(self, x: mx.array) -> mx.array:
        part = self._quantized(x) if self._packing else x @ self["weight"].T
        total = self._group.sum(part.astype(mx.float32)).astype(part.dtype)
        return total + self["bias"] if "bias" in self else total

    def _quantized(self, x: mx.array) -> mx.array:
        scales, biases = self["scales"], self.get("biases")
        return mx.quantized_matmul(
            x, self["weight"], scales=scales, biases=biases, transpose=True, **self._packing
        )


def sum_in_float32(model: nn.Module, group: RankGroup) -> None:
    """Replace mlx-lm's summing layers. Sums in a model's own code stay."""
    kinds = (ShardedToAllLinear, QuantizedShardedToAllLinear)
    layers = {
        path: Float32Sum(layer, group)
        for path, layer in model.named_modules()
        if isinstance(layer, kinds)
    }
    replace_layers(model, layers)
