"""MLX multiplies quantized layers that have one group a row wrongly, on Hopper.

Fault: where group_size is k, `supports_qmm_sm90` (mlx/backend/cuda/quantized/qmm/qmm.cu) allows a
kernel with wrong products of two or more rows.
Seen: MLX 0.32.4, H200: 64 inputs, affine, 4 and 8 bits.
Upstream: no report was found in November 2026; the kernel is of
https://github.com/ml-explore/mlx/pull/3160.
Without: wrong tokens on Hopper, for example with low-rank projections.
"""

# The weights of such layers are kept unpacked: the same numbers, a little more memory.

from __future__ import annotations

import mlx.core as mx
from mlx import nn
from mlx_lm.models.mla import MultiLinear

from trouper import workarounds

WRONG_ON = "sm_90"
BITS, SHORTEST = (4, 8), 64
OF_HEADS = "QuantizedMultiLinear"
"""Of mlx-lm's class, and of mlx-vlm's copy."""


def must_be_unpacked(module: nn.Module, architecture: str) -> bool:
    is_active = workarounds.is_active(__name__)
    return is_active and architecture == WRONG_ON and is_affected(module)


def is_affected(module: nn.Module) -> bool:
    is_packed = isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
    if not is_packed and type(module).__name__ != OF_HEADS:
        return False
    single_group = module.scales.shape[-1] == 1
    return (
        single_group
        and module.mode == "affine"
        and module.bits in BITS
        and module.group_size >= SHORTEST
    )


def unpacked(module: nn.Module) -> nn.Module:
    """The layer with plain weights, in the dtype of its scales."""
    weight = mx.dequantize(
        module.weight,
        module.scales,
        module.biases,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )
    outputs, inputs = weight.shape[-2:]
    plain: nn.Module
    if isinstance(module, nn.QuantizedEmbedding):
        plain = nn.Embedding(outputs, inputs)
    elif type(module).__name__ == OF_HEADS:
        plain = MultiLinear(inputs, outputs, len(weight))
    else:
        plain = nn.Linear(inputs, outputs, bias="bias" in module)
        if "bias" in module:
            plain.bias = module.bias
    plain.weight = weight
    return plain
