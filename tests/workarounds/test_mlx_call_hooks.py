"""Hooks around the calls of modules; tests/engine/test_states_taken_back.py has their use."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from trouper.workarounds import VARIABLE
from trouper.workarounds.mlx_call_hooks import hook_calls


def call_twice(hooked: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the classes whose calls the hook gets."""
    if not hooked:
        monkeypatch.setenv(VARIABLE, "mlx_call_hooks")
    layer, seen = nn.Linear(2, 2), list[str]()

    def hook(kind: Any, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        seen.append(kind.__name__)
        return kind.__call__(module, *args, **options)

    expected = layer(mx.ones(2))
    with hook_calls([layer], hook):
        assert mx.array_equal(layer(mx.ones(2)), expected)
    assert type(layer) is nn.Linear
    layer(mx.ones(2))
    return seen


def test_calls_are_hooked_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call_twice(hooked=True, monkeypatch=monkeypatch) == ["Linear"]
    assert not call_twice(hooked=False, monkeypatch=monkeypatch)


def test_it_is_still_needed() -> None:
    assert [name for name in dir(nn.Module) if "hook" in name] == ["__subclasshook__"]
