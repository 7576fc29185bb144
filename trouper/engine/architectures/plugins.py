"""Plugins: modules with mlx-lm's interface, registered under a `model_type` by entry points."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import attrs
from xxhash import xxh3_64_hexdigest

from trouper.engine.platform.error_text import line_of
from trouper.protocol.problems import ModelUnusable

GROUP = "trouper.architectures"
"""Entry point group of architectures that mlx-lm lacks: model_type = module."""
OVERRIDES = "trouper.architectures.overrides"
"""Group of architectures that override mlx-lm's, distinguished without an import."""


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
def _registered(group: str, path: tuple[str, ...]) -> dict[str, tuple[Plugin, ...]]:  # noqa: ARG001  The metadata is searched on it.
    found: dict[str, tuple[Plugin, ...]] = {}
    for entry in entry_points(group=group):
        found[entry.name] = (*found.get(entry.name, ()), Plugin(entry))
    return found
