"""Seam of encoders: one image at a time, layer by layer, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from trouper.engine.platform import device
from trouper.protocol.media import Pixels

Weights = dict[str, mx.array]
Rotation = tuple[mx.array, ...]
"""Cosines and sines (patches, dim of a head / 2) float32; () without rotary positions."""
Heads = tuple[mx.array, mx.array, mx.array]
"""Queries, keys and values (1, heads, patches, dim of a head)."""
ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "silu": nn.silu,
    "quick_gelu": nn.gelu_fast_approx,
}
"""By their names in transformers' configs."""


CPU_PIECE_PATCHES = 256


def patches_at_once() -> int:
    """Patches of a layer in one piece of work; 0: all."""
    # A layer of a large image takes seconds on a CPU, while streams would stand still.
    return CPU_PIECE_PATCHES if device.is_cpu() else 0


class Tower(Protocol):
    """The encoder and projector of a checkpoint. Arrays stay lazy, unless scores are too many."""

    patch_weight: str
    """Name of the matrix over patches, a convolution in checkpoints."""
    embedding_scale: float
    """Factor that the text model gives its embeddings, by which vectors are divided."""

    @property
    def num_layers(self) -> int:
        pass

    @property
    def num_deepstack(self) -> int:
        """Number of the text model's layers that get vectors of inner layers."""

    def embed(self, pixels: Pixels) -> tuple[mx.array, Any]:
        """Hidden states (patches, dim) before the first layer, and what layers need to know of the
        image: a tuple of arrays and numbers, such as a `Rotation`."""

    def project_heads(self, index: int, hidden: mx.array, places: Any) -> Any:
        """Queries, keys and values of layer `index`, such as `Heads`. `places`: from `embed`."""

    def run_patches(self, index: int, hidden: mx.array, heads: Any, patches: slice) -> mx.array:
        """Hidden states of some patches after layer `index`."""

    def deepstack_of(self, index: int, hidden: mx.array) -> mx.array | None:
        """Vectors (tokens, text dim) after layer `index`; None if the layer gives none."""

    def project(self, hidden: mx.array, pixels: tuple[int, int]) -> mx.array:
        """Vectors (tokens, text dim) after the last layer. `pixels`: height and width."""
