"""SplitMix64 (Steele, Lea, Flood 2014): a hash of 64-bit integers, for noise and ranks' digests."""

from __future__ import annotations

from typing import Any

import numpy as np

# 2^64 over the golden ratio: the increment.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
Integers = np.ndarray[Any, np.dtype[np.uint64]]


def mix64(values: Integers) -> Integers:
    """The finalizer: each input bit changes half of the output's bits."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
