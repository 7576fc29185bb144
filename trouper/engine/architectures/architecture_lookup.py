"""Finds the classes of a config's `model_type`, for mlx-lm's `load_model`.

The order: an overriding plugin, mlx-lm, a plugin, our own encoders, mlx-vlm. Only the result is
imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Any

import attrs
import mlx_lm.models
from mlx_lm import utils
from xxhash import xxh3_64_hexdigest

from trouper.engine.architectures import vision_texts, vlm_models
from trouper.engine.platform.error_text import line_of
from trouper.protocol.installing import command_for
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.version import VERSION

GROUP = "trouper.architectures"
"""Entry point group of architectures that mlx-lm lacks: model_type = module."""
OVERRIDES = "trouper.architectures.overrides"
"""Group of architectures that override mlx-lm's, distinguished without an import."""
ENCODERS = {
    "bert": "bert",
    "camembert": "bert",
    "roberta": "bert",
    "xlm-roberta": "bert",
    "mpnet": "bert",
    "distilbert": "bert",
    "modernbert": "modern_bert",
    "nomic_bert": "gated_bert",
    "new": "gated_bert",
    "gte": "gated_bert",
    "embedding_gemma2": "embedding_gemma2",
    "embedding_gemma2_text": "embedding_gemma2",
}
"""Modules of `trouper.engine.encoders` by model_type."""
OTHER_NAMES = {"llama_bidirec": "llama"}
"""Modules of mlx-lm by the model_type of embedders made from its decoders."""


@attrs.frozen
class Plugin:
    entry: EntryPoint

    @property
    def description(self) -> str:
        package = self.entry.dist
        return (
            f"{self.entry.value} of {package.name} {package.version}"
            if package
            else self.entry.value
        )

    def classes(self) -> tuple[Any, Any]:
        """Import `Model` and `ModelArgs`. Raises `ModelUnusable`."""
        try:
            module = self.entry.load()
        except (
            Exception,
            SystemExit,
        ) as error:
            # A package's code may raise any exception.
            reason = (
                line_of(error) if isinstance(error, Exception) else f"it exits with {error.code}"
            )
            raise ModelUnusable(
                f"the plugin {self.description}, which registers model_type {self.entry.name!r}, "
                f"cannot be imported: {reason}",
                "update or uninstall that package",
            ) from error
        missing = [name for name in ("Model", "ModelArgs") if not hasattr(module, name)]
        if missing:
            raise ModelUnusable(
                f"the plugin {self.description}, which registers model_type {self.entry.name!r}, "
                f"has no {missing[0]}",
                "a plugin has the interface of a module of mlx_lm.models",
            )
        return module.Model, module.ModelArgs

    def digest(self) -> str:
        """The imported module's file may change without the version."""
        file = getattr(sys.modules.get(self.entry.module), "__file__", None)
        return xxh3_64_hexdigest(Path(file).read_bytes()) if file else ""


def plugin_for(model_type: str, group: str = GROUP) -> Plugin | None:
    """Imports nothing. Raises `ModelUnusable` if several packages register the type."""
    found = _registered(group, tuple(sys.path)).get(model_type, ())
    if len(found) > 1:
        raise ModelUnusable(
            f"model_type {model_type!r} is registered by "
            f"{' and by '.join(plugin.description for plugin in found)}",
            "uninstall all but one of these packages",
        )
    return found[0] if found else None


def registered() -> frozenset[str]:
    path = tuple(sys.path)
    return frozenset(_registered(GROUP, path)) | frozenset(_registered(OVERRIDES, path))


def descriptions() -> list[str]:
    """All plugins, with the versions of their packages. Imports none."""
    path = tuple(sys.path)
    return sorted(
        f"{group} {name} {plugin.description}"
        for group in (GROUP, OVERRIDES)
        for name, plugins in _registered(group, path).items()
        for plugin in plugins
    )


@cache
def _registered(group: str, path: tuple[str, ...]) -> dict[str, tuple[Plugin, ...]]:  # noqa: ARG001
    found: dict[str, tuple[Plugin, ...]] = {}
    for entry in entry_points(group=group):
        found[entry.name] = (*found.get(entry.name, ()), Plugin(entry))
    return found


Classes = tuple[Any, Any]
DEFINES_MODEL = re.compile(r"^class Model\b", re.MULTILINE)


@attrs.frozen(eq=False)
class Architecture:
    """`provider`: text for a person. `get_classes` imports."""

    provider: str
    get_classes: Callable[[], Classes]
    plugin: Plugin | None = None
    native: bool = False
    encodes: bool = False
    """Whether the classes are of an encoder (`trouper.engine.encoders`)."""

    @property
    def identity(self) -> str:
        """Version of the code for caches; "" for mlx-lm's own. The classes must be imported."""
        return (
            ""
            if self.native
            else f"{self.provider} {'' if self.plugin is None else self.plugin.digest()}".strip()
        )


def find_architecture(config: Mapping[str, Any]) -> Architecture:
    """Imports no module. Raises `ModelUnusable`, with the package to install."""
    kind = str(config["model_type"])
    if override := plugin_for(kind, OVERRIDES):
        return Architecture(override.description, override.classes, override)
    provider = f"mlx-lm {version('mlx-lm')}"
    if make := vision_texts.CLASSES.get(kind):
        return Architecture(provider, lambda: make(config), native=True)
    if is_native(config):
        return Architecture(provider, lambda: _native_classes(config), native=True)
    if plugin := plugin_for(kind):
        return Architecture(plugin.description, plugin.classes, plugin)
    if kind in ENCODERS:
        return Architecture(f"trouper {VERSION}", lambda: _encoder_classes(kind), encodes=True)
    if vlm_models.has(config):
        return Architecture(
            f"mlx-vlm {vlm_models.version()}", lambda: vlm_models.text_classes(config)
        )
    raise ModelUnusable(
        f"no architecture for model_type {kind!r}: mlx-lm {version('mlx-lm')} has none",
        _remedy(kind),
    )


def is_native(config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm has a module for the config."""
    return _module_file(_module_name(config)) is not None


def get_classes(config: Mapping[str, Any]) -> Classes:
    """Raises `ModelUnusable`."""
    return find_architecture(config).get_classes()


def _native_classes(config: Mapping[str, Any]) -> Classes:
    try:
        module = import_module(f"mlx_lm.models.{_module_name(config)}")
        return module.Model, module.ModelArgs
    except AttributeError as error:  # A module that models share, such as `base`.
        kind = str(config["model_type"])
        raise ModelUnusable(f"mlx-lm's module {kind!r} is no model", _remedy(kind)) from error


def _encoder_classes(kind: str) -> Classes:
    module = import_module(f"trouper.engine.encoders.{ENCODERS[kind]}")
    return module.Model, module.ModelArgs


def _module_name(config: Mapping[str, Any]) -> str:
    """Return the name of mlx-lm's module for a config, as `mlx_lm.load` finds it."""
    kind, architectures = str(config["model_type"]), config.get("architectures")
    for architecture in (
        architectures if isinstance(architectures, list | tuple) else (architectures,)
    ):
        if remapped := utils.MODEL_ARCHITECTURE_REMAPPING.get((kind, str(architecture))):
            return str(remapped)
    return str(utils.MODEL_REMAPPING.get(kind, OTHER_NAMES.get(kind, kind)))


def _module_file(name: str) -> Path | None:
    """Some names of mlx_lm.models have a dash."""
    if not re.fullmatch(r"[\w-]+", name):
        return None
    files = (Path(directory) / f"{name}.py" for directory in mlx_lm.models.__path__)
    return next((file for file in files if file.is_file()), None)


def _remedy(kind: str) -> str:
    has_vlm = vlm_models.version() is not None
    vlm = (
        f"mlx-vlm {vlm_models.version()} has no text part of it either"
        if has_vlm
        else f"mlx-vlm may: {command_for('vlm')}"
    )
    nearest = get_close_matches(kind, known_types(), n=1)
    hint = f"; the nearest known model_type is {nearest[0]!r}" if nearest else ""
    return (
        f"{vlm}; a plugin may register it as an entry point of {GROUP}, or a newer mlx-lm may have "
        f"it{hint}"
    )


def known_types() -> list[str]:
    files = [file for directory in mlx_lm.models.__path__ for file in Path(directory).glob("*.py")]
    native = {file.stem for file in files if DEFINES_MODEL.search(file.read_text("utf-8"))}
    ours = set(utils.MODEL_REMAPPING) | set(ENCODERS) | set(OTHER_NAMES) | registered()
    return sorted(native | ours | vlm_models.names())
