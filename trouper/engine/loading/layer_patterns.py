r"""Patterns of layer names in PEFT's `alpha_pattern`, matched in linear time.

PEFT matches regular expressions, which may backtrack for ever. Accepted patterns match in one way
only: `q_proj`, `^model.layers.[0-5].mlp`, `layers\.\d+\.mlp.down_proj`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Sets have no dot, and repeat only before one.
PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.|(?:\\d|\[[\w-]+\])(?:\+(?=\\?\.))?)*\$?")
DOT = re.compile(r"\\?\.")
MAX_PATTERNS = 100  # Each pattern other than a plain name is tried for each layer.


class LayerPatterns:
    """Values by pattern; the first match decides."""

    def __init__(self, values: Any) -> None:
        """`values`: from JSON. Raises `ValueError`."""
        if not isinstance(values, Mapping | None):
            raise ValueError("it is no object")  # noqa: TRY004 - as for all that it may be
        self._names: dict[str, tuple[int, Any]] = {}
        self._others: list[tuple[int, int, re.Pattern[str], Any]] = []
        """Order, number of parts, expression, value."""
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
        return min(self._matching(layer), key=lambda found: found[0], default=(0, otherwise))[1]

    def _matching(self, layer: str) -> Iterator[tuple[int, Any]]:
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
    """Negative for a whole name."""
    count = 1 + len(DOT.findall(pattern))
    return -count if pattern.startswith("^") else count
