"""Registry of adaptations that some of mlx-lm's models need before rows of different lengths may
share their passes.

A pass over several rows has one offset for each row, a mask that differs between rows, and padding.
Most models support that. The models here assume one offset, one mask or their own cache; each entry
of the registry recognises such a model, by its structure where that is possible, and changes it:
either the traits of our caches and masks, or a submodule of this instance, which is replaced by one
with the same arithmetic. A replaced submodule does outside of our passes what the original does.
Without the registry such models fail when they are batched, in a crash or silently, and must run
row by row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import mlx.nn as nn
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from trouper.engine.adaptations.block_sparse_attention import BlockSparseAttention
from trouper.engine.adaptations.cache_traits import USUAL, Traits
from trouper.engine.adaptations.chunked_attention import ChunkedAttention, TemperedProjection
from trouper.engine.adaptations.row_offsets import (
    CurrentPass,
    RowByRowRope,
    RowOffsetRope,
    RowPositions,
)
from trouper.engine.kv.region import Region
from trouper.engine.lora.lora_layers import WithAdapters, with_adapters
from trouper.engine.platform import device
from trouper.workarounds.mlx_single_groups import must_be_unpacked, unpacked
from trouper.workarounds.mlx_sorted_experts import RowMajorExperts, has_biased_experts


@attrs.define(eq=False)
class Adapted:
    """Adaptations of one instance of a model."""

    current: CurrentPass = attrs.field(factory=CurrentPass)
    traits: Traits = USUAL
    """Traits of the caches of this model."""
    history: int | None = None
    """Number of last tokens of a row that the model keeps in a cache of arrays; rows that have
    fewer begin with zeros."""
    chunked: bool = False
    """Whether the model's chunked caches have a counterpart in slots."""
    alone: str = ""
    """Why rows of this model cannot share a pass; "" if they can."""
    names: list[str] = attrs.field(factory=list)

    @contextmanager
    def during(self, region: Region) -> Iterator[None]:
        """Set the current region while a pass over it is built."""
        self.current.region = region
        try:
            yield
        finally:
            self.current.region = None


@attrs.frozen
class Adaptation:
    """A named adaptation. `apply` changes the model or its traits if it recognises the model, and
    returns whether it did."""

    name: str
    apply: Callable[[nn.Module, Adapted], bool]


def adapted(model: nn.Module) -> Adapted:
    """Adapt a model once; later calls return the same result."""
    found: Adapted | None = getattr(model, "adapted", None)
    if found is None:
        found = Adapted()
        found.names += [
            adaptation.name for adaptation in REGISTRY if adaptation.apply(model, found)
        ]
        model.adapted = found
    return found


INNER: dict[type[nn.Module], str] = {
    ChunkedAttention: "attention",
    TemperedProjection: "projection",
    BlockSparseAttention: "attention",
    RowMajorExperts: "experts",
    RowByRowRope: "rope",
    RowOffsetRope: "rope",
    RowPositions: "table",
}
"""Modules that stand around one of the model's own, and the attribute that has it."""


def original_paths(model: nn.Module) -> dict[str, str]:
    """The present path of each module by the one that it has in the model's code, and in a
    checkpoint: without the modules that adaptations have put around it."""
    modules = dict(model.named_modules())
    around = {
        f"{path}.{INNER[type(module)]}" for path, module in modules.items() if type(module) in INNER
    }
    found: dict[str, str] = {}
    for path in sorted(modules, key=len):  # What stands in another comes after it.
        parts = path.split(".")
        kept = (
            part for index, part in enumerate(parts) if ".".join(parts[: index + 1]) not in around
        )
        found[".".join(kept)] = path
    return found


def _dynamic_rope(model: nn.Module, found: Adapted) -> bool:
    return _replace(
        model, lambda child: isinstance(child, DynamicNTKScalingRoPE), RowByRowRope, found.current
    )


def _shared_kv_rope(model: nn.Module, found: Adapted) -> bool:
    """Attention over another layer's keys and values derives its offset from how many keys it
    gets."""
    attentions = [
        module
        for _, module in model.named_modules()
        if {"keys", "values"} <= _arguments(module)
        and "cache" not in _arguments(module)
        and "rope" in module
    ]
    for module in attentions:
        module.rope = RowOffsetRope(module.rope, found.current)
    return bool(attentions)


def _arguments(module: nn.Module) -> set[str]:
    return set(inspect.signature(type(module).__call__).parameters)


def _learned_positions(model: nn.Module, found: Adapted) -> bool:
    """GPT-2 and its successors name the table `wpe`. Some count positions from a single offset:
    caches give them 0."""
    if not _replace(
        model,
        lambda child: isinstance(child, nn.Embedding | nn.QuantizedEmbedding),
        RowPositions,
        found.current,
        name="wpe",
    ):
        return False
    found.traits = attrs.evolve(found.traits, counts_from_zero=True)
    return True


# -- traits of caches and masks ------------------------------------------------------------------


def _grouped_scores(model: nn.Module, found: Adapted) -> bool:
    """Attention that computes scores itself, (rows, KV heads, repeats, queries, keys) where heads
    are grouped: a mask of four axes would be broadcast along the wrong one."""
    if not _any(
        model,
        lambda module: (
            "attn_logit_softcapping" in _names(module) and getattr(module, "repeats", 1) > 1
        ),
    ):
        return False
    found.traits = attrs.evolve(found.traits, mask_rank=5)
    return True


def _wider_masks(model: nn.Module, found: Adapted) -> bool:
    """A mask over one token more than the cache keeps for its windows: a chunk's later tokens see
    one more than its first."""
    if not _any(
        model, lambda module: {"swa_idx", "full_idx", "window_size", "config"} <= _names(module)
    ):
        return False
    found.traits = attrs.evolve(found.traits, wide_masks=True)
    return True


def _written_buffers(model: nn.Module, found: Adapted) -> bool:
    """An indexer that assigns to its cache's buffers, to bring them into the graph of what is
    computed anyway."""
    if not _any(model, lambda module: {"index_topk", "softmax_scale"} <= _names(module)):
        return False
    found.traits = attrs.evolve(found.traits, open_buffers=True)
    return True


def _token_history(model: nn.Module, found: Adapted) -> bool:
    """Embeddings of n-grams keep up to n - 1 tokens; what is missing counts as zeros."""
    for _, module in model.named_modules():
        if {"embedders", "post_projs", "n"} <= _names(module):
            found.history = module.n - 1
            return True
    return False


def _chunked_attention(model: nn.Module, found: Adapted) -> bool:
    """Layers that attend within chunks, whose masks the model makes from one offset."""
    for _, body in model.named_modules():
        if "attention_chunk_size" in _names(body) and "layers" in body:
            for layer in body.layers:
                layer.self_attn = ChunkedAttention(
                    layer.self_attn, body.attention_chunk_size, found.current
                )
            found.chunked = True
            found.traits = attrs.evolve(found.traits, counts_from_zero=True)
            return True
    return False


def _indexed_blocks(model: nn.Module, found: Adapted) -> bool:
    """Layers that attend to the blocks of keys that an indexer scores best."""

    def matches(child: nn.Module) -> bool:
        return {"index_k_proj", "index_rope", "index_block_size"} <= _names(child)

    return _replace(model, matches, BlockSparseAttention, found.current)


def _sparse_by_distance(model: nn.Module, found: Adapted) -> bool:
    """Keys are left out by how far blocks of them are from the last key of the longest row."""
    if not _any(model, lambda module: "blocksparse_block_size" in _names(module)):
        return False
    found.alone = "its sparse attention counts from the last key of the longest row"
    return True


def _biased_experts(model: nn.Module, found: Adapted) -> bool:
    return _replace(
        model, has_biased_experts, lambda child, _: RowMajorExperts(child), found.current
    )


def _single_groups(model: nn.Module, found: Adapted) -> bool:
    architecture = device.architecture()

    def unpack(layer: nn.Module, _: CurrentPass) -> nn.Module:
        adapters = layer.adapters if isinstance(layer, WithAdapters) else None
        return with_adapters(unpacked(layer), adapters)

    return _replace(
        model, lambda layer: must_be_unpacked(layer, architecture), unpack, found.current
    )


def _names(module: nn.Module) -> set[str]:
    return {*module.keys(), *vars(module)}


def _any(model: nn.Module, matches: Callable[[nn.Module], bool]) -> bool:
    return any(matches(module) for _, module in model.named_modules())


def _replace(
    model: nn.Module,
    matches: Callable[[nn.Module], bool],
    wrapper: Callable[[nn.Module, CurrentPass], nn.Module],
    current: CurrentPass,
    name: str = "",
) -> bool:
    """Wrap each submodule that matches (and has that name), as an attribute of its parent or in a
    list of the parent's."""
    targets = [
        (holder, key)
        for _, parent in model.named_modules()
        for attribute, holder, key in _children(parent)
        if attribute == (name or attribute) and matches(holder[key])
    ]
    for holder, key in targets:
        holder[key] = wrapper(holder[key], current)
    return bool(targets)


def _children(parent: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield (attribute, holder, key) of each child; the holder is the parent or a list of the
    parent's."""
    for name, value in parent.items():
        if isinstance(value, nn.Module):
            yield name, parent, name
        elif isinstance(value, list):
            yield from (
                (name, value, index)
                for index, child in enumerate(value)
                if isinstance(child, nn.Module)
            )


REGISTRY = [
    Adaptation("a rotary embedding whose base grows with the row", _dynamic_rope),
    Adaptation(
        "layers that share keys and values take their offset from the number of keys",
        _shared_kv_rope,
    ),
    Adaptation("learned positions are looked up at each row's own", _learned_positions),
    Adaptation("scores of grouped heads need a mask of five axes", _grouped_scores),
    Adaptation("masks reach one token beyond the window that is kept", _wider_masks),
    Adaptation("an indexer writes into its cache's buffers", _written_buffers),
    Adaptation("outputs of experts with biases are laid out row by row", _biased_experts),
    Adaptation("packed layers with one group a row are unpacked", _single_groups),
    Adaptation("the last tokens of a row are kept as state", _token_history),
    Adaptation("attention within chunks has masks of each row's own", _chunked_attention),
    Adaptation("blocks of keys are chosen by each row's own positions", _indexed_blocks),
    Adaptation("sparse attention counts from the last key", _sparse_by_distance),
]
"""In the order in which they are tried; several may apply to one model."""
