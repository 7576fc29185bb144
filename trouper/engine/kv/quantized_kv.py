"""KV quantization of live rows to 8 or 4 bits."""

# Keys and values are quantized when written, and attention reads quantized values only, also within
# a chunk: results depend neither on chunk sizes nor on other rows, and blocks restore exactly.
# Attention is the model's own over dequantized values: mlx-lm's quantized attention has no sinks or
# compressed (MLA) keys.

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx

from trouper.engine.adaptations.row_offsets import USUAL, Traits
from trouper.engine.kv.full_slots import FullSlots, OpenSlots
from trouper.engine.platform.device import is_cpu


@attrs.frozen
class KvFormat:
    """Format of live KV. 0 bits: not quantized."""

    bits: int = 0
    group_size: int = 64

    def takes(self, dim: int) -> bool:
        """Whether the group size divides heads of this size."""
        return self.bits > 0 and dim % self.group_size == 0

    @property
    def description(self) -> str:
        return f"{self.bits} bits in groups of {self.group_size}"


PLAIN = KvFormat()


class QuantizedSlots(FullSlots):
    """`FullSlots` with packed values, scales and biases as buffers, of keys, then of values."""

    def __init__(self, kv: KvFormat, traits: Traits = USUAL) -> None:
        super().__init__(traits)
        self._kv = kv
        # Number of buffers of keys, and of values.
        self._widths: tuple[int, ...] = ()
        self._fetched: tuple[mx.array, mx.array] | None = None

    def finish(self) -> None:
        super().finish()
        self._fetched = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Quantize and write (n, heads, width, dim); return dequantized (n, heads, keys, dim)."""
        sides = [self._quantized(keys), self._quantized(values)]
        self._widths = tuple(map(len, sides))
        self._fetched = None
        self._put([part for side in sides for part in side])
        return self.keys_and_values()

    @property
    def _for_kernel(self) -> bool:
        # The kernel for one token a row reads buffers, not what is dequantized.
        return self.kernel_reads and self.region.tiled

    def keys_and_values(self) -> tuple[Any, Any]:
        """Dequantized keys and values, cached for layers that share KV."""
        if self._fetched is None:
            parts, of_keys = [self._view(buffer) for buffer in self.buffers], self._widths[0]
            self._fetched = self._plain(parts[:of_keys]), self._plain(parts[of_keys:])
        return self._for_attention(*self._fetched, gathered=True)

    def _quantized(self, side: mx.array) -> list[mx.array]:
        if not self._kv.takes(side.shape[3]):
            return [side]
        return list(mx.quantize(side, group_size=self._kv.group_size, bits=self._kv.bits))

    def _plain(self, parts: list[mx.array]) -> mx.array:
        if len(parts) == 1:
            return parts[0]
        packed, scales, biases = parts
        return dequantized(packed, scales, biases, self._kv)


class OpenQuantizedSlots(QuantizedSlots, OpenSlots):
    """Quantized slots for models that write into caches."""


def dequantized(packed: mx.array, scales: mx.array, biases: mx.array, kv: KvFormat) -> mx.array:
    """Dequantize to (..., dim) in the scales' dtype."""
    # For 8 bits on CPUs, three plain operations take a third of the time of MLX's unvectorized
    # kernel.
    if kv.bits != 8 or not is_cpu():
        return mx.dequantize(packed, scales, biases, kv.group_size, kv.bits)
    groups = packed.view(mx.uint8).reshape(*scales.shape, kv.group_size).astype(scales.dtype)
    return (groups * scales[..., None] + biases[..., None]).reshape(*scales.shape[:-1], -1)
