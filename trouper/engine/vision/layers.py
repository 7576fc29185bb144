"""Parts that encoders share. Names of weights are those of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trouper.engine.vision.tower import ACTIVATIONS, Heads, Rotation, Weights

unbiased = partial(nn.Linear, bias=False)


class LayeredTower(nn.Module):
    """Implements what most encoders have in common of `tower.Tower`."""

    embedding_scale = 1.0

    stack_path = "blocks"
    """Of the layers, each with `project_heads`. Called with x (patches, dim), heads and a slice, a
    layer computes some patches."""

    @property
    def stack(self) -> list[Any]:
        layers: list[Any] = attrgetter(self.stack_path)(self)
        return layers

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


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = layers


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
    def __init__(
        self, dim: int, inner: int, activation: str, linear: Callable[[int, int], nn.Module]
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(dim, inner), linear(dim, inner)
        self.down_proj = linear(inner, dim)
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class HeadProjections(nn.Module):
    """Queries, keys and values by a matrix each."""

    def __init__(self, dim: int, heads: int, *, bias: bool = True) -> None:
        super().__init__()
        self._heads = heads
        self.q_proj = nn.Linear(dim, dim, bias=bias)
        self.k_proj = nn.Linear(dim, dim, bias=bias)
        self.v_proj = nn.Linear(dim, dim, bias=bias)

    def heads_of(self, x: mx.array) -> Heads:
        """`x`: (patches, dim)."""
        queries, keys, values = (
            split_heads(project(x), self._heads)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return queries, keys, values


class PreNormBlock(nn.Module):
    """A layer of the parts `norm1`, `attn`, `norm2` and `mlp`."""

    def project_heads(self, x: mx.array, rotation: Rotation) -> Heads:
        heads: Heads = self.attn.project_heads(self.norm1(x), rotation)
        return heads

    def __call__(self, x: mx.array, heads: Heads, patches: slice) -> mx.array:
        x = x[patches] + self.attn(heads, patches)
        out: mx.array = x + self.mlp(self.norm2(x))
        return out


def split_heads(x: mx.array, heads: int) -> mx.array:
    """(patches, dim) to (1, heads, patches, dim of a head)."""
    return x.reshape(1, len(x), heads, -1).transpose(0, 2, 1, 3)


def join_heads(attended: mx.array) -> mx.array:
    """(1, heads, patches, dim of a head) to (patches, dim)."""
    joined = attended[0].transpose(1, 0, 2)
    return joined.reshape(len(joined), -1)
