"""Gumbel noise keyed by (seed, position, token id): the same draw in any batch, on any rank.

Sampling is argmax(logits / temperature + noise) (Maddison, Tarlow, Minka: A* Sampling, 2014),
without a generator whose state rows would share.
"""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trouper.protocol.splitmix import GOLDEN, mix64

MASK = 0xFFFFFFFF


def mixed_seeds(seeds: Iterable[int]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer of any integers, (n,) uint64."""
    return mix64(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64))


def stream_keys(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> mx.array:
    """Make a key for each seed and position, both (n,) uint64: (n, 2) uint32, by SplitMix64 on the
    host."""
    value = mix64(seeds ^ (positions + np.uint64(1)) * GOLDEN)
    halves = np.stack([value & np.uint64(MASK), value >> np.uint64(32)], axis=1)
    return mx.array(halves.astype(np.uint32))


def gumbel(keys: mx.array, ids: mx.array) -> mx.array:
    """Gumbel noise (n, k) float32 of keys (n, 2) uint32 and ids (n, k) or (k,) uint32."""
    return gumbel_of(hashed(keys, ids))


def hashed(keys: mx.array, ids: mx.array) -> mx.array:
    """Hash ids (n, k) or (k,) uint32 to (n, k) uint32 by MurmurHash3's finalizer (Appleby 2011),
    keyed twice by keys (n, 2)."""
    bits = (ids * 0x9E3779B1) ^ keys[:, :1]
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = ((bits ^ (bits >> 13)) + keys[:, 1:]) * 0xC2B2AE35
    bits = (bits ^ (bits >> 15)) * 0x27D4EB2F
    return bits ^ (bits >> 16)


def gumbel_of(bits: mx.array) -> mx.array:
    """Map 32 random bits to a Gumbel variate in [-2.9, 22.9], float32: minus the logarithm of an
    exponential waiting time.

    The shortest times win and need a float's full precision: the logarithm of a float near 1 has
    none.
    """
    uniform = mx.minimum((bits.astype(mx.float32) + 0.5) * (1 / (1 << 32)), 1 - 2**-24)
    wait = mx.where(uniform < 2**-10, uniform + 0.5 * uniform * uniform, -mx.log(1 - uniform))
    return -mx.log(wait)
