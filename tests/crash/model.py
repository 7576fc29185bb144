"""`python -m tests.crash.model FAULT serve ...`: the command with a llama that has a fault, planted
from outside."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama

from trouper.cli import main

MARK = (333, 334, 335, 333)
"""Tokens of a prompt that the model does not bear."""


class Fault(Exception):
    """The model's."""


def a_prompt(inputs: mx.array) -> None:
    """Raises for any prompt with the mark in one chunk."""
    if inputs.shape[1] < len(MARK):
        return
    tokens = np.array(inputs)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(MARK), axis=1)
    if (windows == MARK).all(axis=-1).any():
        raise Fault("this prompt")


def two_rows(inputs: mx.array) -> None:
    """Raises as soon as two rows decode together, as gpt_bigcode's code did. Not in the pass of two
    tokens that is built, and not computed, when the model is loaded: that one would find it."""
    rows, width = inputs.shape
    if rows > 1 and width == 1:
        raise Fault("two rows")


class Gone:
    """Raises always, from the first prompt of several tokens on: the device is lost."""

    gone = False

    def __call__(self, inputs: mx.array) -> None:
        self.gone = self.gone or inputs.shape[1] > 1
        if self.gone:
            raise Fault("the device")


FAULTS: dict[str, Callable[[mx.array], None]] = {
    "a_prompt": a_prompt,
    "two_rows": two_rows,
    "gone": Gone(),
}


def plant(fault: Callable[[mx.array], None]) -> None:
    plain = llama.Model.__call__

    def faulty(self: Any, inputs: mx.array, *args: Any, **kwargs: Any) -> Any:
        fault(inputs)
        return plain(self, inputs, *args, **kwargs)

    llama.Model.__call__ = faulty


if __name__ == "__main__":
    plant(FAULTS[sys.argv.pop(1)])
    main()
