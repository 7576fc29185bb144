"""Registry of adaptations for mlx-lm's models that assume one offset, one mask or their own cache.
Other models run row by row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import mlx.nn as nn
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from trouper.engine.adaptations.block_sparse_attention import BlockSparseAttention
from trouper.engine.adaptations.chunked_attention import ChunkedAttention, TemperedProjection
from trouper.engine.adaptations.row_offsets import (
    USUAL,
    CurrentPass,
    RowByRowRope,
    RowOffsetRope,
    RowPositions,
    Traits,
)
from trouper.engine.lora.lora_layers import WithAdapters, with_adapters
from trouper.engine.passes.region import Region
from trouper.engine.platform import device
from trouper.workarounds.mlx_large_experts import LargeSwitchLinear, has_large_experts
from trouper.workarounds.mlx_single_groups import must_be_unpacked, unpacked
from trouper.workarounds.mlx_sorted_experts import RowMajorExperts, has_biased_experts


@attrs.define(eq=False)
class Adapted:
    current: CurrentPass = attrs.field(factory=CurrentPass)
    traits: Traits = USUAL
    history: int | None = None
    """Last tokens that the model caches; shorter rows begin with zeros."""
    chunked: bool = False
    """Whether slots replace the model's chunked caches."""
    alone: str = ""
    """Why rows cannot share a pass, or ""."""
    mrope: bool = False
    """Whether images have positions on three axes (`image_passes.py`)."""
    reach_in_full_layers: bool = True
    """Whether tokens of an image attend to later ones also in layers without a window, if they
    do in others."""
    names: list[str] = attrs.field(factory=list)

    @contextmanager
    def during(self, region: Region) -> Iterator[None]:
        """Set the region while a pass is built."""
        self.current.region = region
        try:
            yield
        finally:
            self.current.region = None


# An entry recognises a model, by structure where possible, and changes traits of caches and masks,
# or wraps submodules, with the same arithmetic.
@attrs.frozen
class Adaptation:
    """`apply` changes a model that it recognises, and returns whether."""

    name: str
    apply: Callable[[nn.Module, Adapted], bool]


def adapted(model: nn.Module) -> Adapted:
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
    LargeSwitchLinear: "experts",
    RowMajorExperts: "experts",
    RowByRowRope: "rope",
    RowOffsetRope: "rope",
    RowPositions: "table",
}
"""Attribute of the wrapped module, by wrapper."""


def original_paths(model: nn.Module) -> dict[str, str]:
    """A module's present path by its path in a checkpoint, without wrappers."""
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


LONG_ROPE = {"_short_freqs": "_long_freqs", "_short_scale": "_long_scale"}


def _long_rope(model: nn.Module, found: Adapted) -> bool:  # noqa: ARG001  As the others.
    """mlx-vlm chooses by a pass's last position, so keys depend on how a prompt is cut into passes
    and on what is cached. mlx-lm always takes the long factors, vLLM where the context exceeds the
    original one."""
    chosen = [
        child
        for _, child in model.named_modules()
        if {*LONG_ROPE, *LONG_ROPE.values()} <= _names(child)
    ]
    for rope in chosen:
        for short, long in LONG_ROPE.items():
            rope[short] = rope[long]
    return bool(chosen)


def _shared_kv_rope(model: nn.Module, found: Adapted) -> bool:
    """Attention over another layer's KV derives its offset from the number of keys."""
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
    """GPT-2's table is `wpe`. Some count positions from one offset: caches give 0."""
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
    """Scores (rows, KV heads, repeats, queries, keys), for which a mask of four axes broadcasts
    wrongly."""
    if not _any(
        model,
        lambda module: (
            "attn_logit_softcapping" in _names(module) and getattr(module, "repeats", 1) > 1
        ),
    ):
        return False
    found.traits = attrs.evolve(found.traits, mask_rank=5)
    return True


def _wider_caches(model: nn.Module, found: Adapted) -> bool:  # noqa: ARG001  As the others.
    """Masks reach one token beyond what caches keep, which later tokens of a pass saw and its first
    did not. Later versions of mlx-lm keep it."""
    for _, module in model.named_modules():
        if {"swa_idx", "full_idx", "window_size", "config"} <= _names(module):
            module.config.window_size = module.window_size + 1  # `make_cache` reads it.
            return True
    return False


def _written_buffers(model: nn.Module, found: Adapted) -> bool:
    """An indexer that assigns to its cache's buffers."""
    if not _any(model, lambda module: {"index_topk", "softmax_scale"} <= _names(module)):
        return False
    found.traits = attrs.evolve(found.traits, open_buffers=True)
    return True


def _token_history(model: nn.Module, found: Adapted) -> bool:
    """N-gram embeddings keep up to n - 1 tokens; missing ones are zeros."""
    for _, module in model.named_modules():
        if {"embedders", "post_projs", "n"} <= _names(module):
            found.history = module.n - 1
            return True
    return False


def _chunked_attention(model: nn.Module, found: Adapted) -> bool:
    """Layers within chunks, with masks from one offset."""
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
    def matches(child: nn.Module) -> bool:
        return {"index_k_proj", "index_rope", "index_block_size"} <= _names(child)

    return _replace(model, matches, BlockSparseAttention, found.current)


def _sparse_by_distance(model: nn.Module, found: Adapted) -> bool:
    """Keys are left out by distance from the longest row's last key."""
    if not _any(model, lambda module: "blocksparse_block_size" in _names(module)):
        return False
    found.alone = "its sparse attention counts from the last key of the longest row"
    return True


def _biased_experts(model: nn.Module, found: Adapted) -> bool:
    return _replace(
        model, has_biased_experts, lambda child, _: RowMajorExperts(child), found.current
    )


def _large_experts(model: nn.Module, found: Adapted) -> bool:
    return device.runs_cuda_kernels() and _replace(
        model, has_large_experts, lambda child, _: LargeSwitchLinear(child), found.current
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
    """Wrap matching submodules (of that name), also in lists."""
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
    """(attribute, holder, key) of each child; the holder is the parent or a list."""
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
    Adaptation("LongRoPE has its long factors at each length", _long_rope),
    Adaptation(
        "layers that share keys and values take their offset from the number of keys",
        _shared_kv_rope,
    ),
    Adaptation("learned positions are looked up at each row's own", _learned_positions),
    Adaptation("scores of grouped heads need a mask of five axes", _grouped_scores),
    Adaptation("caches keep every token that masks reach", _wider_caches),
    Adaptation("an indexer writes into its cache's buffers", _written_buffers),
    Adaptation("outputs of experts with biases are laid out row by row", _biased_experts),
    Adaptation("experts of 2 GiB or more are multiplied range by range", _large_experts),
    Adaptation("packed layers with one group a row are unpacked", _single_groups),
    Adaptation("the last tokens of a row are kept as state", _token_history),
    Adaptation("attention within chunks has masks of each row's own", _chunked_attention),
    Adaptation("blocks of keys are chosen by each row's own positions", _indexed_blocks),
    Adaptation("sparse attention counts from the last key", _sparse_by_distance),
]
"""In order of trial; several may apply."""
