"""Watches: the latest value that one actor publishes and others read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import attrs

T = TypeVar("T")


@attrs.define(eq=False)
class Watch(Generic[T]):
    """An outward edge that holds one value: a newer one replaces an older one.

    One actor publishes frozen values; anyone may look, and nobody waits. This is the best-effort
    edge for statistics (health, pressure): asking an actor a question would have to wait for its
    step.
    """

    latest: T

    def publish(self, value: T) -> None:
        self.latest = value


@attrs.define(eq=False)
class Relayed(Watch[T]):
    """A watch that calls `changed` after each value, so that another value can be derived from
    it."""

    changed: Callable[[], None]

    def publish(self, value: T) -> None:
        self.latest = value
        self.changed()
