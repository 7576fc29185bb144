"""Watches: the latest value that one actor publishes and others read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import attrs

T = TypeVar("T")


@attrs.define(eq=False)
class Watch(Generic[T]):
    """One actor publishes frozen values; anyone reads, and nobody waits."""

    latest: T

    def publish(self, value: T) -> None:
        self.latest = value


@attrs.define(eq=False)
class Relayed(Watch[T]):
    """A watch that calls `changed` after each value, to derive another."""

    changed: Callable[[], None]

    def publish(self, value: T) -> None:
        self.latest = value
        self.changed()
