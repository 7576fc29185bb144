"""Text models of vision checkpoints that mlx-lm has, but not by the checkpoint's `model_type` or by
its names of weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import attrs
import mlx.core as mx
from mlx import nn
from mlx_lm import utils

from trouper.protocol.problems import ModelUnusable

Weights = dict[str, mx.array]
Classes = tuple[Any, Any]
Config = Mapping[str, Any]
BODY = re.compile(r"^model\.language_model\.")
PREFIX = "language_model."
TEXT = re.compile(r"^(?:model\.language_model\.|language_model\.model\.)")
HEAD = re.compile(r"^(?:language_model\.)?lm_head\.")
TIED = "tie_word_embeddings"
NAMES = {
    **dict.fromkeys(("glm4v", "glm4v_text"), "glm4"),
    **dict.fromkeys(("glm4v_moe", "glm4v_moe_text"), "glm4_moe"),
}
"""mlx-lm's modules of other names than the text's `model_type`."""
GLM_DEFAULTS = {"attention_bias": True, "partial_rotary_factor": 1.0, "use_qk_norm": False}
"""Of transformers, for keys that mlx-lm's modules require."""


def _kimi_classes(_config: Config) -> Classes:
    # mlx-lm's kimi_vl does not split `kv_b_proj`, as its kimi_k25 with the same parts does.
    module = import_module("mlx_lm.models.kimi_k25")
    return module.Model, module.ModelArgs


def _lfm_classes(_config: Config) -> Classes:
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


@attrs.frozen
class NestedArgs:
    """The whole config."""

    config: Config

    @classmethod
    def from_dict(cls, config: Config) -> NestedArgs:
        return cls(config)


class NestedText(nn.Module):
    """Any text model of mlx-lm within a vision model."""

    def __init__(self, module: Any, args: NestedArgs) -> None:
        """`module`: mlx-lm's."""
        super().__init__()
        text = dict(args.config["text_config"])
        if text.get("model_type") in NAMES:
            head_dim = text["hidden_size"] // text["num_attention_heads"]
            text = {**GLM_DEFAULTS, "head_dim": head_dim, "rope_scaling": None, **text}
        text[TIED] = bool(args.config.get(TIED) or text.get(TIED))
        self.model_type = str(args.config["model_type"])
        self.language_model = module.Model(module.ModelArgs.from_dict(text))

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        logits: mx.array = self.language_model(*args, **options)
        return logits

    def sanitize(self, weights: Weights) -> Weights:
        """Keep the text model's weights, by names of transformers' older and newer versions."""
        text: Weights = {}
        for name, weight in weights.items():
            if TEXT.match(name):
                text[TEXT.sub("model.", name)] = weight
            elif HEAD.match(name):
                text[HEAD.sub("lm_head.", name)] = weight
        if hasattr(self.language_model, "sanitize"):
            text = self.language_model.sanitize(text)
        return {PREFIX + name: each for name, each in text.items()}

    @property
    def layers(self) -> Any:
        return self.language_model.layers


def _text_module(config: Config) -> Any:
    """Raises `ModelUnusable`."""
    kind = str(config.get("model_type"))
    name = NAMES.get(kind) or utils.MODEL_REMAPPING.get(kind, kind)
    try:
        module = import_module(f"mlx_lm.models.{name}")
    except ImportError as error:
        raise ModelUnusable(f"mlx-lm has no text model of model_type {kind!r}") from error
    if not hasattr(module, "Model"):
        raise ModelUnusable(f"mlx-lm's module {kind!r} is no model")
    return module


def _nested_classes(config: Config) -> Classes:
    text = config.get("text_config") or config.get("llm_config") or {}
    return partial(NestedText, _text_module(text)), NestedArgs


CLASSES: dict[str, Callable[[Config], Classes]] = {
    "kimi_vl": _kimi_classes,
    "lfm2_vl": _lfm_classes,
    "lfm2-vl": _lfm_classes,
    **dict.fromkeys(("internvl", "internvl_chat"), _nested_classes),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), _nested_classes),
}
"""By `model_type`. Each imports mlx-lm's module."""
