"""MLX multiplies by sorted experts outside their memory on CUDA where they have 2 GiB or more.

Fault: `mx.gather_mm(..., sorted_indices=True)` computes an expert's first byte in 32 bits
(`prepare_grouped_mm_data` in mlx/backend/cuda/gemms/grouped_gemm_unaligned.cu).
Seen: MLX 0.32.4: 288 experts of 1280 x 4096 in bfloat16, at 64 or more pairs of token and expert.
Upstream: no report was found in November 2026; the kernel is of
https://github.com/ml-explore/mlx/pull/2902.
Without: an illegal memory access with large experts that are not packed, such as Step 3.7's.
"""

# Such layers multiply all rows by each range of experts below that size. A row keeps the product of
# its own expert. Without `sorted_indices` MLX would read an expert once for each of its rows.

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from trouper import workarounds

LIMIT = 2**31
"""Bytes from the first expert to another that the kernel counts."""
NAME = "SwitchLinear"
"""Of mlx-lm's class, and of mlx-vlm's copy."""


class LargeSwitchLinear(nn.Module):
    """An expert layer whose weights (experts, outputs, inputs) are multiplied range by range."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x (rows, 1, inputs) and indices (rows,) if sorted; outputs (rows, 1, outputs)."""
        if not sorted_indices:
            unsorted: mx.array = self.experts(x, indices)
            return unsorted
        weight = self.experts.weight
        count = max(LIMIT // _expert_bytes(weight), 1)
        ranges = [(first, weight[first : first + count]) for first in range(0, len(weight), count)]
        output, *others = (
            mx.gather_mm(
                x,
                experts.swapaxes(-1, -2),
                rhs_indices=mx.clip(indices, first, first + len(experts) - 1) - first,
                sorted_indices=True,
            )
            for first, experts in ranges
        )
        for (first, _), product in zip(ranges[1:], others, strict=True):
            output = mx.where((indices >= first)[:, None, None], product, output)
        if "bias" in self.experts:
            output = output + mx.expand_dims(self.experts.bias[indices], -2)
        return output


def has_large_experts(module: nn.Module) -> bool:
    return (
        type(module).__name__ == NAME
        and (len(module.weight) - 1) * _expert_bytes(module.weight) >= LIMIT
        and workarounds.is_active(__name__)
    )


def _expert_bytes(weight: mx.array) -> int:
    return weight.nbytes // len(weight)
