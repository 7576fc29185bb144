"""Linear layers with the matrices of several adapters: a subclass takes the path and the parameters
of the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from trouper.engine.lora.row_adapters import CurrentAdapters, RowAdapters, applied, current_adapters
from trouper.engine.products.linear_layers import (
    FastLinear,
    FastQuantizedLinear,
    convert,
    replace_layers,
)

# Ranks are padded: GPU products read 16 bytes of a row, and a gathered float32 product of rank 5
# crashed with a misaligned address on an H100 (MLX 0.32.4).
RANK_STEP = 8


@attrs.frozen(eq=False)
class LowRank:
    """An adapter's part of a layer: x A B. a: (inputs, rank), b: (rank, outputs), scale
    included."""

    a: mx.array
    b: mx.array


@attrs.frozen(eq=False)
class StackedAdapters:
    """Matrices of all adapters; index 0 has zeros. a: (1 + adapters, inputs, rank), b: (1 +
    adapters, rank, outputs), with the greatest padded rank."""

    current: CurrentAdapters
    a: mx.array
    b: mx.array
    ranks: tuple[int, ...]
    """From index 1; 0: no part."""

    def added(self, x: mx.array) -> mx.array | None:
        """Sum of the rows' adapters for the layer's input; None without adapters."""
        adapters = self.current.adapters
        return None if adapters is None else adapters.product(x, self.a, self.b)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


class WithAdapters(nn.Module):
    adapters: StackedAdapters

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = super().__call__(x)
        added = self.adapters.added(x)
        return out if added is None else out + added.astype(out.dtype)


class LoraLinear(WithAdapters, nn.Linear):
    pass


class LoraQuantizedLinear(WithAdapters, nn.QuantizedLinear):
    pass


class LoraFastLinear(WithAdapters, FastLinear):
    pass


class LoraFastQuantizedLinear(WithAdapters, FastQuantizedLinear):
    pass


KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: LoraLinear,
    nn.QuantizedLinear: LoraQuantizedLinear,
    FastLinear: LoraFastLinear,
    FastQuantizedLinear: LoraFastQuantizedLinear,
}


def may_have_adapters(layer: nn.Module) -> bool:
    return type(layer) in KINDS or type(layer) in KINDS.values()


def sizes_of(layer: nn.Module) -> tuple[int, int]:
    outputs, inputs = layer.weight.shape
    return (inputs * 32 // layer.bits if isinstance(layer, nn.QuantizedLinear) else inputs), outputs


def install(model: nn.Module, adapters: Sequence[Mapping[str, LowRank]]) -> None:
    """Install and evaluate adapters by layer path, from index 1."""
    modules = dict(model.named_modules())
    current, stacks = current_adapters(model), dict[str, StackedAdapters | None]()
    for path in dict.fromkeys(path for adapter in adapters for path in adapter):
        layer: Any = modules[path]
        made = stacked(
            current, [adapter.get(path) for adapter in adapters], sizes_of(layer), dtype_of(layer)
        )
        mx.eval(made.a, made.b)
        stacks[path] = made
    put(model, stacks)


def dtype_of(layer: nn.Module) -> mx.Dtype:
    """Return the dtype of a layer's matrices. 8-bit scales of mxfp4, mxfp8 and nvfp4 are no dtype
    for products."""
    found: mx.Dtype = (
        layer.scales.dtype if isinstance(layer, nn.QuantizedLinear) else layer.weight.dtype
    )
    return found if mx.issubdtype(found, mx.floating) else mx.bfloat16


def put(model: nn.Module, stacks: Mapping[str, StackedAdapters | None]) -> None:
    """Give layers these adapters, by the layers' paths, instead of the present ones; None: a layer
    is one of the base again."""
    paths, modules = dict[int, list[str]](), dict(model.named_modules())
    for path, module in modules.items():
        paths.setdefault(id(module), []).append(path)  # Several of a layer that parts share.
    changed = dict[str, nn.Module]()
    for path, made in stacks.items():
        layer = with_adapters(modules[path], made)
        changed |= dict.fromkeys(paths[id(modules[path])], layer)
    replace_layers(model, changed)


def with_adapters(layer: nn.Module, made: StackedAdapters | None) -> nn.Module:
    plain = next((base for base, kind in KINDS.items() if type(layer) is kind), type(layer))
    kind = plain if made is None else KINDS[plain]
    adapted: Any = layer if type(layer) is kind else convert(layer, kind)
    if made is not None:
        adapted.adapters = made
    else:
        vars(adapted).pop("adapters", None)
    return cast(nn.Module, adapted)


def part_of(layer: Any, index: int) -> LowRank | None:
    found: StackedAdapters | None = getattr(layer, "adapters", None)
    if found is None or index > len(found.ranks) or not (rank := found.ranks[index - 1]):
        return None
    return LowRank(found.a[index, :, :rank], found.b[index, :rank])


def stacked(
    current: CurrentAdapters,
    parts: Sequence[LowRank | None],
    sizes: tuple[int, int],
    dtype: mx.Dtype,
) -> StackedAdapters:
    """Stack lazily, from index 1. None: no part."""
    inputs, outputs = sizes
    rank = padded_rank(max(part.a.shape[1] for part in parts if part is not None))
    nothing = LowRank(mx.zeros((inputs, 0)), mx.zeros((0, outputs)))
    given = [nothing, *(part or nothing for part in parts)]
    a = mx.stack(
        [mx.pad(part.a.astype(dtype), [(0, 0), (0, rank - part.a.shape[1])]) for part in given]
    )
    b = mx.stack(
        [mx.pad(part.b.astype(dtype), [(0, rank - part.b.shape[0]), (0, 0)]) for part in given]
    )
    return StackedAdapters(
        current, a, b, tuple(0 if part is None else part.a.shape[1] for part in parts)
    )


def padded_rank(rank: int) -> int:
    return -(-rank // RANK_STEP) * RANK_STEP


def stacked_bytes(layer: nn.Module, adapters: int, rank: int) -> int:
    return (1 + adapters) * sum(sizes_of(layer)) * padded_rank(rank) * dtype_of(layer).size


def bytes_to_install(model: nn.Module, adapters: Sequence[Mapping[str, LowRank]]) -> int:
    modules, ranks = dict(model.named_modules()), dict[str, int]()
    for path, part in (found for adapter in adapters for found in adapter.items()):
        ranks[path] = max(ranks.get(path, 0), part.a.shape[1])
    return sum(stacked_bytes(modules[path], len(adapters), rank) for path, rank in ranks.items())


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    return {path: layer for path, layer in model.named_modules() if type(layer) in KINDS.values()}


def adapter_bytes(model: nn.Module) -> int:
    return sum(layer.adapters.nbytes for layer in adapted_layers(model).values())


class TriedAdapters(RowAdapters):
    """Records the layers that a trial pass reaches."""

    WIDTH = 3

    def __init__(self, current: CurrentAdapters, rows: int) -> None:
        super().__init__(current, np.ones(rows, np.int32), gathered=True)
        self.seen: set[int] = set()

    def product(self, x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        rows = len(self._rows)
        if x.shape[0] not in (rows, rows * self.WIDTH):
            raise ValueError(f"a layer gets {x.shape[0]} rows of a pass over {rows}")
        self.seen.add(id(a))
        return super().product(x, a, b)


def layers_not_reached(model: nn.Module, rows: int) -> list[str]:
    """Build a pass over `rows` rows, without evaluation. Returns paths of layers whose adapters
    took no part. May raise any exception of a model."""
    tried = TriedAdapters(current_adapters(model), rows)
    with applied(tried):
        model(mx.zeros((rows, TriedAdapters.WIDTH), mx.int32), cache=make_prompt_cache(model))
    return [
        path
        for path, layer in adapted_layers(model).items()
        if id(layer.adapters.a) not in tried.seen
    ]
