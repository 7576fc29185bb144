"""MLX's modules have no hooks around their calls, which drafts over recurrent states need.

Fault: the calls that change a recurrent state are recorded, to be repeated over fewer tokens. A
module calls its children as its own code has it, and `nn.Module` offers no hook there.
Seen: MLX 0.32.4.
Upstream: by design.
Without: no drafts for models with recurrent states.
"""

# While calls are hooked, the modules of this one model have subclasses of their classes.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.nn as nn

from trouper import workarounds

Hook = Callable[[Any, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Called in the place of a call, with the module's class, the module, and the arguments by position
and by name; returns what the call returns."""


@contextmanager
def hook_calls(modules: Sequence[nn.Module], hook: Hook) -> Iterator[None]:
    """Hook the calls of these modules."""
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
