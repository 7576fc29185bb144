"""The short convolution of LFM2's embedders, whose tokens see both sides.

Source: LiquidAI/LFM2.5-Embedding-350M; https://github.com/sgl-project/sglang/pull/28691.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.lfm2 import ShortConv


class CentredConvolution(nn.Module):
    """In the place of mlx-lm's `ShortConv`, which sees earlier tokens alone."""

    def __init__(self, causal: ShortConv) -> None:
        super().__init__()
        self.conv, self.in_proj, self.out_proj = causal.conv, causal.in_proj, causal.out_proj
        self._side = (causal.L_cache - 1) // 2
        self.is_token: mx.array | None = None
        """(rows, tokens), False for padding; None: no padding. For the next pass."""

    def __call__(
        self,
        x: mx.array,
        mask: mx.array | None = None,  # noqa: ARG002
        cache: Any = None,  # noqa: ARG002
    ) -> mx.array:
        before, after, inner = mx.split(self.in_proj(x), 3, axis=-1)
        product = before * inner
        if self.is_token is not None:
            # Behind a text, as before it, are zeros.
            product = mx.where(self.is_token[..., None], product, 0)
        padded = mx.pad(product, [(0, 0), (self._side, self._side), (0, 0)])
        return self.out_proj(after * self.conv(padded))


def centre_convolutions(body: nn.Module) -> list[CentredConvolution]:
    """Replace the short convolutions of all layers."""
    centred = list[CentredConvolution]()
    for layer in body.layers:
        if isinstance(getattr(layer, "conv", None), ShortConv):
            layer.conv = CentredConvolution(layer.conv)
            centred.append(layer.conv)
    return centred
