"""The form of an embedding program's logits processors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class LogitsProcessor(Protocol):
    """A function of a row's tokens so far and its logits, both `mlx.core.array`, in the form of
    mlx-lm's `logits_processors`.

    It runs on the engine's thread, for one row at a time, and its result may depend on its
    arguments only: a row that was preempted, or whose drafts are verified, is asked again. What it
    returns may be lazy; reading a value waits for the device in each step.
    """

    def __call__(self, tokens: Any, logits: Any, /) -> Any:
        """Return the changed logits, (1, V). tokens (n,) int32: prompt and output; logits (1, V),
        after bias and penalties."""


Processors = Mapping[str, LogitsProcessor]
"""Logits processors by name."""
