"""Interface of an embedding program's logits processors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class LogitsProcessor(Protocol):
    """As mlx-lm's `logits_processors`: called with `mlx.core.array`s on the engine's thread, for
    one row at a time. The result may depend on the arguments only, since calls are repeated. A lazy
    result is best."""

    def __call__(self, tokens: Any, logits: Any, /) -> Any:
        """tokens (n,) int32: prompt and output; logits (1, V), after bias and penalties. Returns
        (1, V)."""


Processors = Mapping[str, LogitsProcessor]
