"""Parts that encoders share. Names of weights are those of checkpoints."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trouper.engine.vision.tower import ACTIVATIONS, Weights


class LayeredTower(nn.Module):
    """Implements what most encoders have in common of `tower.Tower`."""

    embedding_scale = 1.0

    @property
    def stack(self) -> list[Any]:
        """The layers, each with `project_heads`, and called with some patches."""
        raise NotImplementedError

    @property
    def num_layers(self) -> int:
        return len(self.stack)

    @property
    def num_deepstack(self) -> int:
        return 0

    def project_heads(self, index: int, hidden: mx.array, places: Any) -> Any:
        return self.stack[index].project_heads(hidden, places)

    def run_patches(self, index: int, hidden: mx.array, heads: Any, patches: slice) -> mx.array:
        out: mx.array = self.stack[index](hidden, heads, patches)
        return out

    def deepstack_of(self, index: int, hidden: mx.array) -> mx.array | None:  # noqa: ARG002
        return None

    def sanitize(self, weights: Weights) -> Weights:
        """Weights by our names, in the forms of this class."""
        return weights


class PatchEmbedding(nn.Module):
    """A convolution without overlap is a product of flat patches."""

    def __init__(self, inputs: int, dim: int, *, bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, dim, bias=bias)

    def __call__(self, patches: mx.array) -> mx.array:
        embedded: mx.array = self.proj(patches)
        return embedded


class Mlp(nn.Module):
    def __init__(self, dim: int, inner: int, activation: str) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, inner)
        self.fc2 = nn.Linear(inner, dim)
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.fc2(self._activation(self.fc1(x)))
        return out


class GatedMlp(nn.Module):
    def __init__(self, dim: int, inner: int, activation: str, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, inner, bias=bias)
        self.up_proj = nn.Linear(dim, inner, bias=bias)
        self.down_proj = nn.Linear(inner, dim, bias=bias)
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return out


def split_heads(x: mx.array, heads: int) -> mx.array:
    """(patches, dim) to (1, heads, patches, dim of a head)."""
    return x.reshape(1, len(x), heads, -1).transpose(0, 2, 1, 3)


def join_heads(attended: mx.array) -> mx.array:
    """(1, heads, patches, dim of a head) to (patches, dim)."""
    joined = attended[0].transpose(1, 0, 2)
    return joined.reshape(len(joined), -1)
