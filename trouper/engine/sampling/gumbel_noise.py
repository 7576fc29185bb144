"""Gumbel noise keyed by (seed, position, token id): the same draw alone, in any batch, in any order, on any rank.

Sampling is argmax(logits / temperature + noise), the Gumbel-max trick (Maddison, Tarlow, Minka: A* Sampling, 2014). So a draw
needs no generator with a state that rows would share (D2), and noise for a few candidates costs little.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

MASK = 0xFFFFFFFF


def mix(value: int) -> int:
    """Spread any integer (folded to 64 bits) over 64 bits: SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    value &= 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


def stream_keys(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> mx.array:
    """Make one key for each (seed, position), (n, 2) uint32, by SplitMix64 on the host, for all rows at once. seeds, positions:
    (n,) uint64."""
    value = seeds ^ (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    halves = np.stack([value & np.uint64(MASK), value >> np.uint64(32)], axis=1)
    return mx.array(halves.astype(np.uint32))


def gumbel(keys: mx.array, ids: mx.array) -> mx.array:
    """Gumbel noise (n, k) float32 of keys (n, 2) uint32 and ids (n, k) or (k,) uint32."""
    return gumbel_of(hashed(keys, ids))


def hashed(keys: mx.array, ids: mx.array) -> mx.array:
    """Hash ids (n, k) or (k,) uint32 to (n, k) uint32 by MurmurHash3's finalizer (Appleby 2011), keyed twice by keys (n, 2)."""
    bits = (ids * 0x9E3779B1) ^ keys[:, :1]
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = ((bits ^ (bits >> 13)) + keys[:, 1:]) * 0xC2B2AE35
    bits = (bits ^ (bits >> 15)) * 0x27D4EB2F
    return bits ^ (bits >> 16)


def gumbel_of(bits: mx.array) -> mx.array:
    """Map 32 random bits, uint32, to a Gumbel variate in [-2.9, 22.9], float32: minus the logarithm of an exponential waiting time.

    The shortest waiting times win, so they need a float's full precision. Minus the logarithm of a float near 1
    has none, and a float that rounds to 1 would always win: once in 2^24 tokens, whatever its logit.
    """
    uniform = mx.minimum((bits.astype(mx.float32) + 0.5) * (1 / (1 << 32)), 1 - 2**-24)
    wait = mx.where(uniform < 2**-10, uniform + 0.5 * uniform * uniform, -mx.log(1 - uniform))
    return -mx.log(wait)
