"""Text models of vision checkpoints that mlx-lm has, but whose published weights its module does
not read."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import mlx.core as mx

Weights = dict[str, mx.array]
Classes = tuple[Any, Any]
BODY = re.compile(r"^model\.language_model\.")
PREFIX = "language_model."


def _kimi_classes() -> Classes:
    # mlx-lm's kimi_vl does not split `kv_b_proj`, as its kimi_k25 with the same parts does.
    module = import_module("mlx_lm.models.kimi_k25")
    return module.Model, module.ModelArgs


def _lfm_classes() -> Classes:
    # mlx-lm's module keeps the axes of converted convolutions, and the names of converted weights.
    module: Any = import_module("mlx_lm.models.lfm2-vl")

    class Model(module.Model):
        def sanitize(self, weights: Weights) -> Weights:
            named = {BODY.sub(f"{PREFIX}model.", name): each for name, each in weights.items()}
            text = {
                name.removeprefix(PREFIX): each
                for name, each in named.items()
                if name.startswith(PREFIX)
            }
            made = self.language_model.sanitize(text)
            return {PREFIX + name: each for name, each in made.items()}

    return Model, module.ModelArgs


CLASSES: dict[str, Callable[[], Classes]] = {
    "kimi_vl": _kimi_classes,
    "lfm2_vl": _lfm_classes,
    "lfm2-vl": _lfm_classes,
}
"""By `model_type`. Each imports mlx-lm's module."""
