"""Opens a checkpoint by mlx-lm, and explains misfits of weights and config."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_config, load_model

from trouper.engine.architectures.architecture_lookup import find_architecture
from trouper.engine.loading.config_translation import translate
from trouper.protocol.problems import ModelUnusable
from trouper.storage.checkpoint_files import quantized_by, read_json, unnamed_files

PREFIX = "model."  # transformers omits the prefix without a head.
HEAD, TIED = "lm_head.", "tie_word_embeddings"
NO_OUTPUT_HEAD = "its files have no output head (lm_head)"
MAX_NAMED = 3
READ = ("mxfp4", "mxfp8", "bitnet", "awq", "gptq", "modelopt", "nvfp4")
Weights = dict[str, mx.array]
GetClasses = Callable[[dict[str, Any]], tuple[Any, Any]]


def lacks_head(stored: Mapping[str, Any], opened: Mapping[str, Any]) -> bool:
    return bool(opened.get(TIED)) and not stored.get(TIED)


@contextmanager
def plain_path(directory: Path) -> Iterator[Path]:
    """A path in which `glob`, used by mlx-lm, sees no pattern."""
    if not glob.has_magic(str(directory)):
        yield directory
        return
    with TemporaryDirectory(prefix="trouper-") as temporary:
        link = Path(temporary) / "model"
        link.symlink_to(directory.absolute(), target_is_directory=True)
        yield link


@attrs.define(eq=False)
class Opening:
    _get_classes: GetClasses
    _model: nn.Module | None = attrs.field(default=None, init=False)
    _weights: frozenset[str] = attrs.field(factory=frozenset, init=False)

    def open(self, directory: Path) -> tuple[nn.Module, dict[str, Any]]:
        """Open lazily; a body without a head gets embeddings as head. May raise any exception of an
        architecture."""
        config = load_config(directory)
        changed = translate(config, find_architecture(config).get_classes()[1])
        try:
            return self._load(directory, changed)
        except ValueError:
            if not self._lacks_head:
                raise
            return self._load(directory, changed | {TIED: True})

    def _load(self, directory: Path, changed: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
        model, config = load_model(
            directory, lazy=True, model_config=changed, get_model_classes=self._get_model_classes
        )
        return model, config

    @property
    def _lacks_head(self) -> bool:
        # Embeddings need no output head.
        extra, missing = self._compare()
        return bool(missing) and not extra and all(HEAD in name for name in missing)

    def _compare(self) -> tuple[frozenset[str], frozenset[str]]:
        parameters = frozenset() if self._model is None else _names(self._model)
        return self._weights - parameters, parameters - self._weights

    def _get_model_classes(self, config: dict[str, Any]) -> tuple[Any, Any]:
        # The first class is a function.
        kind, arguments = self._get_classes(config)

        def make(args: Any) -> nn.Module:
            model: nn.Module = kind(args)
            sanitize = getattr(model, "sanitize", None)

            def sanitized(weights: Weights) -> Weights:
                del model.sanitize  # The class's own is there again.
                weights = add_prefix(weights, _names(model))
                if sanitize is not None:
                    weights = sanitize(weights)
                self._weights = frozenset(weights)
                return weights

            model.sanitize = sanitized
            self._model = model
            return model

        return make, arguments

    def explain(self, directory: Path, reason: str) -> ModelUnusable:
        """Why weights and config make no model: an unread quantization, other names, or
        `reason`."""
        extra, missing = self._compare()
        method = quantized_by(read_json(directory / "config.json"))
        names_differ = bool(extra or missing)
        is_unread = bool(method) and method not in READ
        if is_unread and (names_differ or not self._weights):
            return ModelUnusable(
                f"{directory} is quantized by {method}, which is not read for this architecture: "
                "use the unquantized model, or a conversion for MLX"
            )
        if method:
            reason = f"they are quantized by {method}: {reason}"
        elif self._weights and names_differ:
            reason = "; ".join(
                f"{names} {label}"
                for names, label in (
                    (_some_of(missing), "missing"),
                    (_some_of(extra), "not in the model"),
                )
                if names
            )
        mixed = unnamed_files(directory)
        remedy = f"; {', '.join(mixed)} is in no index: remove what is older" if mixed else ""
        return ModelUnusable(
            f"{directory}: the weights and config.json do not make a model: {reason}{remedy}"
        )


def add_prefix(weights: Mapping[str, mx.array], parameters: frozenset[str]) -> Weights:
    if any(name.startswith(PREFIX) for name in weights):
        return dict(weights)
    added = {name: f"{PREFIX}{name}" for name in weights if name not in parameters}
    if not any(new in parameters for new in added.values()):
        return dict(weights)
    return {added.get(name, name): weight for name, weight in weights.items()}


def _names(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in tree_flatten(model.parameters()))


def _some_of(names: frozenset[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(islice(sorted(names), MAX_NAMED)) + more
