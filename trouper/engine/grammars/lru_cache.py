"""A least-recently-used cache with a bound in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = Lock()
        self.nbytes = 0

    def get(self, key: Hashable) -> Value | None:
        """Return a value, marked as used, or None."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: Value, nbytes: int) -> None:
        """A value above the bound is not kept."""
        with self._lock:
            if key in self._values:
                self.nbytes -= self._values.pop(key)[1]
            self._values[key] = value, nbytes
            self.nbytes += nbytes
            while self.nbytes > self._max_bytes:
                _, (_, size) = self._values.popitem(last=False)
                self.nbytes -= size
