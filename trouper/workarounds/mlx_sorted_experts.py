"""MLX multiplies by sorted experts wrongly on CUDA where rows are laid out in another order.

Fault: `mx.gather_mm(..., sorted_indices=True)` takes the distance of rows (rows, 1, dim) from the
stride of the axis of size 1, which is arbitrary (`ensure_batch_contiguous` in
mlx/backend/cuda/matmul.cpp).
Seen: MLX 0.32.4.
Upstream: https://github.com/ml-explore/mlx/issues/4253 (pull request 3960: Metal alone).
Without: wrong tokens of gpt_oss on CUDA now and then.
"""

# mlx-lm adds the bias of expert layers as `x + mx.expand_dims(bias[indices], -2)`. A sum takes the
# memory, and with it the strides, of its first operand if that one's buffer is not much larger than
# needed, else of its second. Which one depends on the buffers that earlier work has left in MLX's
# cache. Models whose experts have no bias are right.

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from trouper import workarounds

LAYERS = ("SwitchLinear", "QuantizedSwitchLinear")
"""Names of the classes of expert layers, of which mlx-vlm has copies."""


class RowMajorExperts(nn.Module):
    """An expert layer with a bias and row-major outputs."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x (rows, 1, inputs) or (batch, length, 1, 1, inputs); outputs of that rank."""
        output: mx.array = self.experts(x, indices, sorted_indices=sorted_indices)
        return row_major(output) if sorted_indices else output


def row_major(x: mx.array) -> mx.array:
    """A view with row-major strides; `mx.contiguous` keeps a row-contiguous array's."""
    return mx.unflatten(mx.flatten(x), 0, x.shape)


def has_biased_experts(module: nn.Module) -> bool:
    return is_expert_layer(module) and "bias" in module and workarounds.is_active(__name__)


def is_expert_layer(module: nn.Module) -> bool:
    return type(module).__name__ in LAYERS
