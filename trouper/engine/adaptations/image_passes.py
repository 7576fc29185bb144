"""Text models of mlx-lm take images: the encoder's vectors, M-RoPE and deepstack.

Modules get subclasses of their classes, so paths and kinds stay, and compute as before without
images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trouper.engine.adaptations.adaptation_registry import adapted
from trouper.engine.adaptations.row_offsets import CurrentPass
from trouper.engine.passes.media_pass import MediaPass
from trouper.workarounds.mlx_call_hooks import extend_module, hook_calls


class MediaEmbedding(nn.Module):
    """An embedding of tokens, with the encoder's vectors in their places."""

    current_pass: CurrentPass

    def __call__(self, tokens: mx.array) -> mx.array:
        embedded: mx.array = super().__call__(tokens)
        media = _media(self.current_pass)
        return embedded if media is None else media.put(embedded)


class PerLayerEmbedding(nn.Module):
    """An embedding of tokens for each layer, in which tokens of images are padding."""

    current_pass: CurrentPass
    pad_token: int

    def __call__(self, tokens: mx.array) -> mx.array:
        media = _media(self.current_pass)
        if media is not None:
            tokens = media.put_token(tokens, self.pad_token)
        embedded: mx.array = super().__call__(tokens)
        return embedded


class DeepstackLayer(nn.Module):
    """A layer of the text model that adds vectors of an inner layer of the encoder."""

    current_pass: CurrentPass
    deepstack_index: int

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        hidden: mx.array = super().__call__(*args, **options)
        media = _media(self.current_pass)
        return hidden if media is None else media.add_deepstack(hidden, self.deepstack_index)


class MropeRope(nn.Module):
    """Rotary embedding with three axes."""

    # Text has equal positions on all axes, for which mlx-lm's rotary embedding is the same.

    current_pass: CurrentPass
    sections: MropeSections
    dims: int
    base: float
    traditional: bool
    """Whether neighbours turn together, and not halves."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """`x`: (n, heads, width, dim), of which the first `dims` are rotated."""
        media = _media(self.current_pass)
        if media is None:
            plain: mx.array = super().__call__(x, offset=offset)
            return plain
        cosines, sines = media.rotation((self.dims, self.base), self._compute)
        wide = x[..., : self.dims].astype(mx.float32)
        if self.traditional:
            first, second = wide[..., 0::2], wide[..., 1::2]
        else:
            first, second = mx.split(wide, 2, axis=-1)
        turned = [first * cosines - second * sines, second * cosines + first * sines]
        join = mx.stack if self.traditional else mx.concatenate
        rotated = join(turned, axis=-1).reshape(wide.shape).astype(x.dtype)
        return mx.concatenate([rotated, x[..., self.dims :]], axis=-1)

    def _compute(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        half = self.dims // 2
        frequencies = self.base ** (-np.arange(half, dtype=np.float64) / half)
        chosen = positions[mx.array(self.sections.axes(half))]
        angles = chosen.transpose(1, 2, 0)[:, None] * mx.array(frequencies.astype(np.float32))
        return mx.cos(angles), mx.sin(angles)


class MropeSections:
    """Numbers of frequencies of frames, rows and columns (`mrope_section` of a config).
    `interleaved`: as in Qwen3-VL and Qwen3.5; else one axis after another, as in Qwen2-VL."""

    def __init__(self, sizes: Sequence[int], *, interleaved: bool = True) -> None:
        self._sizes, self._interleaved = tuple(sizes), interleaved

    @property
    def frequencies(self) -> int:
        return sum(self._sizes)

    def axes(self, half: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """(half,): axis of each frequency. Interleaved: frame, row, column, frame, ..., then frames
        alone."""
        axes = np.zeros(half, np.uint32)
        if not self._interleaved:
            sections = np.repeat(np.arange(len(self._sizes)), self._sizes)
            axes[: len(sections)] = sections
            return axes
        for axis in (1, 2):
            axes[axis : 3 * self._sizes[axis] : 3] = axis
        return axes


def adapt_to_images(
    model: nn.Module,
    sections: MropeSections | None,
    deepstack: int,
    *,
    reach_in_full_layers: bool,
) -> None:
    """Let the model's passes take images. `sections`: of M-RoPE, if the model has it. `deepstack`:
    number of layers that get vectors. `reach_in_full_layers`: see `Adapted`. Raises `ValueError`
    for a model of another structure."""
    adaptations, body = adapted(model), _body(model)
    adaptations.reach_in_full_layers = reach_in_full_layers
    if sections is not None:
        ropes = [part.rope for _, part in body.named_modules() if "rope" in part]
        _require_mrope(ropes, sections)
        for rope in ropes:
            extend_module(rope, MropeRope)
            rope.sections = sections
            rope.current_pass = adaptations.current
        adaptations.mrope = True
    extend_module(body.embed_tokens, MediaEmbedding)
    body.embed_tokens.current_pass = adaptations.current
    per_layer = body.get("embed_tokens_per_layer")
    if per_layer is not None:
        extend_module(per_layer, PerLayerEmbedding)
        per_layer.current_pass = adaptations.current
        per_layer.pad_token = body.config.pad_token_id or 0
    for index, layer in enumerate(body.layers[:deepstack]):
        extend_module(layer, DeepstackLayer)
        layer.current_pass, layer.deepstack_index = adaptations.current, index


def padding_of(model: nn.Module) -> int | None:
    """The token whose embedding for each layer images have; None without such embeddings."""
    layer_inputs = (m for _, m in model.named_modules() if isinstance(m, PerLayerEmbedding))
    return next((module.pad_token for module in layer_inputs), None)


def measure_embedding_scale(model: nn.Module) -> float:
    """Return the factor from the embedding of a token to the first layer's input: Gemma's models
    multiply behind `embed_tokens`."""
    body = _body(model)
    inputs = list[mx.array]()

    def keep(kind: Any, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        inputs.append(args[0])
        return kind.__call__(layer, *args, **options)

    tokens = mx.array([[1]])
    with hook_calls(body.layers[:1], keep):
        model(tokens)
    embedded, scaled = body.embed_tokens(tokens).astype(mx.float32), inputs[0].astype(mx.float32)
    return float(((embedded * scaled).sum() / (embedded * embedded).sum()).item())


def embedding_of(model: nn.Module) -> nn.Module:
    """The model's embedding of tokens. Raises `ValueError` as `adapt_to_images`."""
    embedding: nn.Module = _body(model).embed_tokens
    return embedding


def _body(model: nn.Module) -> nn.Module:
    bodies = [part for _, part in model.named_modules() if {"embed_tokens", "layers"} <= {*part}]
    if len(bodies) != 1:
        raise ValueError("its text model has no single embedding of tokens")
    return bodies[0]


def _require_mrope(ropes: Sequence[nn.Module], sections: MropeSections) -> None:
    if not ropes or not all(isinstance(rope, nn.RoPE) and rope.scale == 1 for rope in ropes):
        raise ValueError("its rotary embedding is scaled, which images cannot have here")
    if any(2 * sections.frequencies > rope.dims for rope in ropes):
        raise ValueError("its config's mrope_section does not fit its rotary embedding")


def _media(current: CurrentPass) -> MediaPass | None:
    return None if current.region is None else current.region.media
