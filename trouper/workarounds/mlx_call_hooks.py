"""MLX's modules have no hooks around their calls, which drafts and images need.

Fault: `nn.Module` has no hook to record or to extend calls.
Seen: MLX 0.32.4.
Upstream: by design.
Without: no drafts for models with recurrent states, and no images.
"""

# While calls are hooked, or if a module is extended, the modules of this one model have subclasses
# of their classes: paths and kinds of modules stay.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.nn as nn

from trouper import workarounds

Hook = Callable[[Any, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""From (class, module, arguments) to the call's result."""


@contextmanager
def hook_calls(modules: Sequence[nn.Module], hook: Hook) -> Iterator[None]:
    active = modules if workarounds.is_active(__name__) else ()
    kinds: list[Any] = [type(module) for module in active]
    try:
        for module, kind in zip(active, kinds, strict=True):
            module.__class__ = _hooked(kind, hook)
        yield
    finally:
        for module, kind in zip(active, kinds, strict=True):
            module.__class__ = kind


@cache
def _hooked(kind: Any, hook: Hook) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **options: Any) -> Any:
        return hook(kind, self, args, options)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def extend_module(module: nn.Module, mixin: Any) -> None:
    """Let calls of this module go through `mixin` first, for good. Raises `ValueError` if the
    workaround is off."""
    if not workarounds.is_active(__name__):
        raise ValueError(f"the workaround {__name__} is off")
    if not isinstance(module, mixin):
        kind: Any = type(module)
        module.__class__ = _extended(kind, mixin)


@cache
def _extended(kind: Any, mixin: Any) -> type[nn.Module]:
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
