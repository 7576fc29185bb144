"""Text parts of mlx-vlm's models, an optional extra, with mlx-lm's interface."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from trouper.engine.kv import attention_seam
from trouper.engine.kv.model_caches import treat_alike
from trouper.engine.platform.error_text import line_of
from trouper.protocol.problems import ModelUnusable
from trouper.workarounds.mlx_vlm_positions import forget_positions

PACKAGE = "mlx_vlm"
PREFIX = "language_model."
PARTS = ("text", "vision", "perceiver", "projector", "audio")
ONLY_OWN_KEYS = ("glm_ocr", "phi4-siglip", "phi4_siglip")
"""Their text configs are made of any keys, which raises for those of `config_translation`."""
Weights = dict[str, mx.array]


def version() -> str | None:
    try:
        return metadata.version("mlx-vlm") if find_spec(PACKAGE) is not None else None
    except metadata.PackageNotFoundError:
        return None


def names() -> frozenset[str]:
    """Names of mlx-vlm's modules with a language model."""
    return (
        frozenset(file.parent.name for file in _directory().glob("*/language.py"))
        if version()
        else frozenset()
    )


def has(config: Mapping[str, Any]) -> bool:
    """Imports the package, but no model."""
    if version() is None:
        return False
    name = str(_utils().get_model_type(dict(config)))
    return name.replace("-", "_").isidentifier() and (_directory() / name / "__init__.py").is_file()


def text_classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Raises `ModelUnusable`."""
    kind = config["model_type"]
    try:
        module, _ = _utils().get_model_and_args(dict(config))
    except Exception as error:
        raise ModelUnusable(
            f"mlx-vlm's module for model_type {kind!r} cannot be imported: {line_of(error)}"
        ) from error
    if not hasattr(module, "Model") or not hasattr(module, "ModelConfig"):
        raise ModelUnusable(
            f"mlx-vlm's module for model_type {kind!r} is no model that answers with text"
        )
    caches = importlib.import_module(f"{PACKAGE}.models.cache")
    for kind in (KVCache, RotatingKVCache, ArraysCache, CacheList):
        treat_alike(getattr(caches, kind.__name__), kind)
    attention_seam.replace_too(
        importlib.import_module(f"{PACKAGE}.models.base").scaled_dot_product_attention
    )
    return partial(WrappedLanguageModel, module), LanguageModelArgs


class LanguageModelArgs(dict[str, Any]):
    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> LanguageModelArgs:
        """A copy: mlx-vlm changes the config."""
        return cls(deepcopy(dict(config)))


# The model's `sanitize` renames weights for the whole model, encoders included: the whole is built
# lazily, and only `language_model` is kept and read.
class WrappedLanguageModel(nn.Module):
    """The `language_model` with mlx-lm's interface."""

    def __init__(self, module: Any, args: LanguageModelArgs) -> None:
        super().__init__()
        model = _vlm_model(module, args)
        language_model = getattr(model, "language_model", None)
        if language_model is None:
            raise ModelUnusable(
                f"mlx-vlm's module for model_type {args['model_type']!r} has no language_model"
            )
        paths = (path for path, part in model.named_modules() if part is language_model)
        path = next(paths, "language_model")
        self._prefix = f"{path}." if path else ""
        if args["model_type"] == "minicpmv4_7":  # Else an image's token in a text raises.
            language_model.config.image_token_id = language_model.config.video_token_id = -1
        self.language_model = language_model
        self._sanitize = (
            model.sanitize if hasattr(model, "sanitize") else dict
        )  # A bound method is no part of the module.

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """Compute logits (rows, tokens, vocabulary) of tokens (rows, tokens)."""
        forget_positions(self.language_model, len(inputs))
        output = self.language_model(inputs, cache=cache)
        logits: mx.array = getattr(output, "logits", output)
        return logits

    def sanitize(self, weights: Weights) -> Weights:
        """Rename a checkpoint's weights as in mlx-vlm, and keep the text part."""
        named = self._sanitize(weights)
        if hasattr(self.language_model, "sanitize"):
            named = self.language_model.sanitize(named)
        self._sanitize = dict  # The encoders are no longer needed.
        return {
            PREFIX + name.removeprefix(self._prefix): weight
            for name, weight in named.items()
            if name.startswith(self._prefix)
        }

    def make_cache(self) -> list[Any]:
        """Make mlx-vlm's own caches for one row."""
        caches: list[Any] = importlib.import_module(f"{PACKAGE}.models.cache").make_prompt_cache(
            self.language_model
        )
        return caches

    @property
    def layers(self) -> Any:
        inner = self.language_model
        return inner.layers if hasattr(inner, "layers") else inner.model.layers


def _vlm_model(module: Any, args: LanguageModelArgs) -> Any:
    config = {**args}
    config.setdefault("text_config", config.pop("llm_config", {}))
    config.setdefault("vision_config", {})
    config.setdefault("audio_config", {})
    if args["model_type"] in ONLY_OWN_KEYS:
        own = signature(module.TextConfig).parameters
        text = config["text_config"]
        config["text_config"] = {key: value for key, value in text.items() if key in own}
    made = module.ModelConfig.from_dict(config)
    return module.Model(_utils().update_module_configs(made, module, config, PARTS))


def _utils() -> Any:
    return importlib.import_module(f"{PACKAGE}.utils")


def _directory() -> Path:
    spec = find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations, "mlx-vlm is not installed"
    return Path(spec.submodule_search_locations[0]) / "models"
