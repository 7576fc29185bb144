"""Embeddings: pooled hidden states of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from trouper.engine.embeddings.embedding_modules import (
    NO_MODULES,
    EmbeddingModules,
    NotSupported,
    modules_of,
    normalized,
)
from trouper.engine.kv import attention_seam
from trouper.engine.kv.model_body import body_of
from trouper.protocol.model import EmbeddingLayout
from trouper.protocol.plans import Pooling
from trouper.protocol.problems import ModelUnusable
from trouper.storage.checkpoint_files import read_json

WINDOWED = "window_size"  # Attribute of a body with windowed layers.
NO_GENERATION = "each of its tokens attends to those behind it"


def is_bidirectional(config: Mapping[str, Any]) -> bool:
    """False for images alone (`"vision"`)."""
    classes = config.get("architectures")
    named = classes if isinstance(classes, list) else []
    return (
        config.get("use_bidirectional_attention") is True
        or config.get("is_causal") is False
        or any("Bidirectional" in str(name) for name in named)
    )


def encoder_of(body: nn.Module, config: Mapping[str, Any]) -> Callable[[list[int]], mx.array]:
    """Return a function from tokens to hidden states (tokens, dim). `body`: the model without the
    head."""
    attention_seam.install(body)
    window = None
    if hasattr(body, WINDOWED):
        # transformers halves the window, which is that of both sides
        # (configuration_gemma3.py, masking_utils.py).
        window = int(config["sliding_window"]) // 2 + 1
        # A mask as an array then says that a layer has a window, whatever the length.
        setattr(body, WINDOWED, 1)

    def encode(tokens: list[int]) -> mx.array:
        with attention_seam.bidirectional(window):
            hidden: mx.array = body(mx.array([tokens]))
        return hidden[0]

    return encode


POOLINGS: dict[str, Pooling] = {
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "lasttoken": "last",
    "cls": "first",
    "max": "max",
    "weightedmean": "weighted",
}

# Boolean switches of older files.
SWITCHES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@attrs.frozen
class Embedder:
    """The form of embeddings, or None with a reason from the files, and the modules behind
    pooling."""

    layout: EmbeddingLayout | None = None
    reason: str = ""
    modules: EmbeddingModules = NO_MODULES


def embedder_of(
    model: nn.Module,
    directory: Path,
    report: Callable[[str], None] = lambda _: None,
    config: Mapping[str, Any] = MappingProxyType({}),
) -> Embedder:
    """`report` gets a line if the files rule embeddings out."""
    body = body_of(model)
    found = Embedder() if body is None else _embedder(model, body, directory)
    if body is not None and found.layout is not None and is_bidirectional(config):
        encode = encoder_of(body, config)
        found = attrs.evolve(found, modules=attrs.evolve(found.modules, encode=encode))
    if found.reason:
        report(f"no embeddings: {found.reason}")
    return found


def _embedder(model: nn.Module, body: nn.Module, directory: Path) -> Embedder:
    try:
        modules = modules_of(directory)
        if (pooling := pooling_of(directory / modules.pooling)) is None:
            return Embedder(
                reason=(
                    f"{modules.pooling}/config.json joins several vectors, or pools in a way that "
                    "is not known"
                )
            )
        hidden = body(mx.array([[0]]), cache=make_prompt_cache(model))
        dimensions = modules.applied(mx.zeros(hidden.shape[-1])).shape
    except (NotSupported, ValueError) as error:  # ValueError: a product of shapes that do not fit.
        return Embedder(reason=str(error))
    return Embedder(EmbeddingLayout(int(dimensions[0]), pooling), modules=modules)


def pooling_of(directory: Path) -> Pooling | None:
    """The default is the mean. None: joined or unknown poolings."""
    try:
        config = read_json(directory / "config.json")
    except ModelUnusable:
        return "mean"
    names = _names_of(config)
    return POOLINGS.get(names[0]) if len(names) == 1 else None if names else "mean"


def _names_of(config: dict[str, Any]) -> list[str]:
    # One name or a list since 2026, before that a switch for each.
    named = config.get("pooling_mode")
    if isinstance(named, str | list):
        return [named] if isinstance(named, str) else [str(name) for name in named]
    return [name for switch, name in SWITCHES.items() if config.get(switch)]


@attrs.define(eq=False)
class Pool:
    pooling: Pooling
    kept: mx.array | None = None
    tokens: int = 0

    def add(self, hidden: mx.array) -> None:
        """Add hidden states (tokens, dim)."""
        states = hidden.astype(mx.float32)
        first, self.tokens = self.tokens, self.tokens + states.shape[0]
        match self.pooling:
            case "mean" | "mean_sqrt":
                self.kept = states.sum(0) if self.kept is None else self.kept + states.sum(0)
            case "last":
                self.kept = states[-1]
            case "first":
                self.kept = states[0] if self.kept is None else self.kept
            case "max":
                self.kept = (
                    states.max(0) if self.kept is None else mx.maximum(self.kept, states.max(0))
                )
            case "weighted":
                weighted = (states * mx.arange(first + 1, self.tokens + 1)[:, None]).sum(0)
                self.kept = weighted if self.kept is None else self.kept + weighted

    def pooled(self) -> mx.array:
        """Return (dim,) float32, as sentence-transformers does."""
        assert self.kept is not None
        match self.pooling:
            case "mean":
                return self.kept / self.tokens
            case "mean_sqrt":
                return self.kept / sqrt(self.tokens)
            case "weighted":
                return self.kept / (self.tokens * (self.tokens + 1) / 2)
            case _:
                return self.kept

    def vector(self, modules: EmbeddingModules = NO_MODULES) -> mx.array:
        """Return the vector behind `modules`, (dim,) float32 of length one."""
        return normalized(modules.applied(self.pooled()))
