r"""Patterns of layers' names in an adapter's config (PEFT's `alpha_pattern`), matched in linear
time.

PEFT takes them as regular expressions for the end of a name. Both patterns and names come from
files, and Python's expressions may backtrack for ever. Adapters name layers or what several layers
share: `q_proj`, `^model.layers.[0-5].mlp`, `layers\.\d+\.mlp.down_proj`. Patterns like these have a
known number of dots and match a name in one way only. Others are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.|(?:\\d|\[[\w-]+\])(?:\+(?=\\?\.))?)*\$?")
"""A pattern that matches in one way only: its sets have no dot, and repeat only before one."""
DOT = re.compile(r"\\?\.")
MAX_PATTERNS = 100
"""Maximum number of patterns that are no plain names: each is tried for each layer."""


class LayerPatterns:
    """Values by patterns of layers' names; the first pattern that matches decides."""

    def __init__(self, values: Any) -> None:
        """`values`: as JSON has them. Raises `ValueError`."""
        if not isinstance(values, Mapping | None):
            raise ValueError("it is no object")  # noqa: TRY004 - as for all that it may be
        self._names: dict[str, tuple[int, Any]] = {}
        """Order and value by the end of a name."""
        self._others: list[tuple[int, int, re.Pattern[str], Any]] = []
        """Order, number of parts between dots, expression and value."""
        for order, (pattern, value) in enumerate((values or {}).items()):
            if not PATTERN.fullmatch(pattern):
                text = pattern if len(pattern) <= 80 else pattern[:80] + " ..."
                raise ValueError(f"{text!r} may match in several ways; give the layers' names")
            name = DOT.sub(".", pattern).removesuffix("$")
            if any(sign in name for sign in "^[\\"):
                expression = re.compile(name.removeprefix("^").replace(".", r"\."))
                self._others.append((order, _parts(pattern), expression, value))
            else:
                self._names.setdefault(name, (order, value))
        if len(self._others) > MAX_PATTERNS:
            raise ValueError(f"more than {MAX_PATTERNS} of its patterns are no plain names")

    def value_for(self, layer: str, otherwise: Any) -> Any:
        """Return the value of the first pattern that matches the end of a layer's name."""
        return min(self._matching(layer), key=lambda found: found[0], default=(0, otherwise))[1]

    def _matching(self, layer: str) -> Iterator[tuple[int, Any]]:
        """Yield order and value of patterns that match."""
        if not self._names and not self._others:
            return
        parts = layer.split(".")
        ends = [".".join(parts[first:]) for first in range(len(parts))] if self._names else []
        yield from (self._names[end] for end in ends if end in self._names)
        for order, count, expression, value in self._others:
            begin = max(len(parts) - abs(count), 0)
            if (count > 0 or begin == 0) and expression.fullmatch(".".join(parts[begin:])):
                yield order, value


def _parts(pattern: str) -> int:
    """Count a pattern's parts between dots; negative: they are a whole name."""
    count = 1 + len(DOT.findall(pattern))
    return -count if pattern.startswith("^") else count
