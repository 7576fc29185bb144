"""A directory becomes a model whose parameters are evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from trouper.engine.kv.model_caches import flatten
from trouper.engine.loading.head_weights import ModelWithoutHead, classes_without_head
from trouper.engine.loading.opening import Opening, plain_path
from trouper.engine.lora.lora_layers import adapter_bytes
from trouper.engine.platform.error_text import line_of
from trouper.engine.products import linear_layers
from trouper.protocol.problems import ModelUnusable

EVALUATION_BYTES = 2**26
"""Dequantizing all at once would hold both forms."""


def opened(directory: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Open a model and its config lazily: only shapes are read. Raises `ModelUnusable`."""
    opening = Opening(classes_without_head)
    try:
        with plain_path(directory) as path:
            model, config = opening.open(path)
    except ModelUnusable as error:
        raise ModelUnusable(f"{directory}: {error.message}", error.remedy) from error
    except (Exception, SystemExit) as error:
        # An architecture's code may raise any exception; OLMo's raises SystemExit for a missing
        # package.
        raise opening.explain(directory, line_of(error)) from error
    if isinstance(model, ModelWithoutHead):
        model = model.take_model()
    # Modules draw initial weights, which the checkpoint replaces. Each draw splits MLX's random key
    # lazily: unless the key is evaluated, every load would leave its splits behind, some 70 kB for
    # a model of two layers.
    mx.eval(mx.random.state)
    return model, config


def bytes_of(model: nn.Module) -> int:
    return adapter_bytes(model) + sum(
        parameter.nbytes for _, parameter in tree_flatten(model.parameters())
    )


def evaluate(model: nn.Module, directory: Path, progress: Callable[[int, int], None]) -> None:
    """Raises `ModelUnusable`."""
    linear_layers.prepare(model)
    parameters = [parameter for _, parameter in tree_flatten(model.parameters())]
    done, total = 0, sum(parameter.nbytes for parameter in parameters)
    progress(done, total)
    try:
        for group in _groups(parameters):
            mx.eval(group)
            done += sum(parameter.nbytes for parameter in group)
            progress(done, total)
    except (RuntimeError, MemoryError) as error:
        raise ModelUnusable(
            f"{directory}: the weights cannot be read into memory: {line_of(error)}"
        ) from error
    mx.clear_cache()


def _groups(parameters: Iterable[mx.array]) -> Iterable[list[mx.array]]:
    group: list[mx.array] = []
    for parameter in parameters:
        group.append(parameter)
        if sum(array.nbytes for array in group) >= EVALUATION_BYTES:
            yield group
            group = []
    yield group


def count_logits(model: nn.Module, directory: Path) -> int:
    """Configs nest or omit the number, or ignore padding. Evaluates nothing."""
    try:
        caches = make_prompt_cache(model)
        if any(getattr(cache, "max_size", None) == 0 for cache in flatten(caches)):
            raise ValueError("a sliding window of 0 tokens")
        return int(model(mx.array([[0]]), cache=caches).shape[-1])
    except Exception as error:
        # An architecture's code may raise any exception.
        raise ModelUnusable(f"{directory}: the model's own code fails: {line_of(error)}") from error
