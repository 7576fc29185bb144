"""Drafters that read taps of the target: EAGLE-3 (https://arxiv.org/abs/2503.01840), DFlash
(https://arxiv.org/abs/2602.06036) and DSpark (https://github.com/deepseek-ai/DeepSpec), with the
parameters' names of published checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3 import MLP
from mlx_lm.models.rope_utils import initialize_rope

from trouper.engine.spec_decode.draft_model import SharedLayers
from trouper.engine.spec_decode.layer_taps import LayerTaps
from trouper.protocol.plans import ProposerName


@attrs.frozen(kw_only=True)
class DrafterShape:
    """What config.json and the tensors' shapes say of a drafter."""

    size: int
    """Dimension of the drafter's hidden states."""
    tapped: int
    """Dimension of all taps together."""
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Dimension within the MLP."""
    eps: float
    rope: Mapping[str, Any]
    """Arguments of mlx-lm's `initialize_rope` after the first."""
    windows: Sequence[int | None]
    """Of each layer; None: full attention."""
    causal: Sequence[bool]
    """Of each layer: whether tokens of a block see only earlier ones. EAGLE-3: all."""
    own_rows: Mapping[str, int] = {}
    """Rows of embed_tokens and lm_head, unless the target's are shared; and of a Markov head."""
    normed_heads: bool = False
    biased: bool = False
    biased_output: bool = False
    """Biases of q, k and v, and of o."""
    norms_taps: bool = False
    normed_residual: bool = False
    """EAGLE-3: a norm before `fc`; the residual is taken after the hidden state's norm."""
    block: int = 0
    """DFlash: tokens of a block, the last committed one included. 0: a token a pass."""
    mask_token: int = 0
    anchored: bool = False
    """Whether the last committed token's state predicts the next token, and so on; else that at
    each mask predicts the token there."""
    markov_rank: int = 0
    """DSpark: dimension of its Markov head."""


class Attention(nn.Module):
    def __init__(self, shape: DrafterShape, inputs: int) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._head_dim = shape.heads, shape.kv_heads, shape.head_dim
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=shape.biased)
        self.k_proj = nn.Linear(inputs, keys, bias=shape.biased)
        self.v_proj = nn.Linear(inputs, keys, bias=shape.biased)
        self.o_proj = nn.Linear(queries, shape.size, bias=shape.biased_output)
        if shape.normed_heads:
            self.q_norm = nn.RMSNorm(shape.head_dim, shape.eps)
            self.k_norm = nn.RMSNorm(shape.head_dim, shape.eps)
        self.rope = initialize_rope(shape.head_dim, **shape.rope)

    def __call__(self, inputs: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        offset = 0 if cache is None else cache.offset  # Before keys are written.
        queries = self._split(self.q_proj(inputs), self._heads)
        if "q_norm" in self:
            queries = self.q_norm(queries)
        queries = self.rope(queries, offset=offset)
        keys, values = self.write(inputs, cache)
        out: mx.array = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self._head_dim**-0.5, mask=mask
        )
        return self.o_proj(out.swapaxes(1, 2).flatten(2))

    def write(self, inputs: mx.array, cache: Any) -> tuple[Any, Any]:
        """Add the keys and values of inputs (n, width, dim). Returns those of all tokens."""
        keys = self._split(self.k_proj(inputs), self._kv_heads)
        if "k_norm" in self:
            keys = self.k_norm(keys)
        keys = self.rope(keys, offset=0 if cache is None else cache.offset)
        values = self._split(self.v_proj(inputs), self._kv_heads)
        return (keys, values) if cache is None else cache.update_and_fetch(keys, values)

    def _split(self, projected: mx.array, heads: int) -> mx.array:
        # (n, heads, width, dim of a head)
        return mx.unflatten(projected, -1, (heads, self._head_dim)).swapaxes(1, 2)


class Layer(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.size, shape.eps)
        self.self_attn = Attention(shape, shape.size)
        self.post_attention_layernorm = nn.RMSNorm(shape.size, shape.eps)
        self.mlp = MLP(shape.size, shape.inner)

    def __call__(self, hidden: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return self._rest(hidden, self.self_attn(self.input_layernorm(hidden), mask, cache))

    def _rest(self, residual: mx.array, attended: mx.array) -> mx.array:
        hidden = residual + attended
        out: mx.array = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class PairLayer(Layer):
    """EAGLE-3's first layer, which attends with pairs of embeddings and hidden states."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__(shape)
        self.self_attn = Attention(shape, 2 * shape.size)
        self.hidden_norm = nn.RMSNorm(shape.size, shape.eps)
        self._normed_residual = shape.normed_residual

    def pair(
        self, embedded: mx.array, hidden: mx.array, mask: Any = None, cache: Any = None
    ) -> mx.array:
        """Run embeddings and hidden states (n, width, dim) each."""
        normed = self.hidden_norm(hidden)
        pair = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        residual = normed if self._normed_residual else hidden
        return self._rest(residual, self.self_attn(pair, mask, cache))


class TappedDrafter(nn.Module):
    """A drafter and the parts of the target. Implements `kv.head_rows.TargetHead`."""

    proposer: ProposerName = "draft_model"

    def __init__(self, shape: DrafterShape, shared: SharedLayers, taps: LayerTaps) -> None:
        super().__init__()
        self._shape, self._shared, self._taps = shape, shared, taps
        self.fc = nn.Linear(shape.tapped, shape.size, bias=False)
        self.norm = nn.RMSNorm(shape.size, shape.eps)
        if rows := shape.own_rows.get("embed_tokens"):
            self.embed_tokens = nn.Embedding(rows, shape.size)
        if rows := shape.own_rows.get("lm_head"):
            self.lm_head = nn.Linear(shape.size, rows, bias=False)
        self._target_tokens: mx.array | None = None

    def name_tokens(self, offsets: mx.array) -> None:
        """Set the target's token of each drafted one: d2t, (draft vocabulary,) differences."""
        tokens = offsets.astype(mx.int32) + mx.arange(offsets.size, dtype=mx.int32)
        self._target_tokens = tokens.astype(mx.uint32)

    @property
    def block(self) -> int:
        return self._shape.block

    @property
    def mask_token(self) -> int:
        return self._shape.mask_token

    @property
    def anchored(self) -> bool:
        return self._shape.anchored

    @property
    def state_bytes(self) -> int:
        return self._shape.tapped * int(self.norm.weight.dtype.size)

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in self._shape.windows]

    def embedded(self, tokens: mx.array) -> mx.array:
        own: mx.array
        own = self.embed_tokens(tokens) if "embed_tokens" in self else self._shared.embedded(tokens)
        return own

    def target_states(self, tokens: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """The model's pass: logits, and taps (n, width, taps * dim)."""
        return self._taps.run(self._shared.model, tokens, cache)

    def split(self, outputs: Any) -> tuple[mx.array | None, mx.array]:
        """(hidden states, logits); no hidden states of a pass without output layer."""
        if isinstance(outputs, mx.array):
            return None, outputs
        logits, states = outputs
        return states, logits

    def picked(self, states: mx.array, before: mx.array | None = None) -> mx.array:  # noqa: ARG002
        """The target's most likely tokens (n, width), uint32. `before`: the tokens (n,) before the
        first ones."""
        return self.best(self.logits_of(states))

    def logits_of(self, states: mx.array) -> mx.array:
        normed = self.norm(states)
        own: mx.array
        own = self.lm_head(normed) if "lm_head" in self else self._shared.logits_of(normed)
        return own

    def best(self, logits: mx.array) -> mx.array:
        best = mx.argmax(logits, axis=-1)
        return best if self._target_tokens is None else self._target_tokens[best]


class Eagle3(TappedDrafter):
    """From the taps of a token, or its own state of a drafted one, and the embedding of the next
    token it predicts the one behind."""

    def __init__(self, shape: DrafterShape, shared: SharedLayers, taps: LayerTaps) -> None:
        super().__init__(shape, shared, taps)
        later = [Layer(shape) for _ in shape.windows[1:]]
        self.layers = [PairLayer(shape), *later]
        if shape.norms_taps:
            self.input_norm = nn.RMSNorm(shape.tapped, shape.eps)

    def __call__(
        self, tokens: mx.array, states: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        """Run tokens (n, width) with taps or own states of the tokens before each; None: zeros.
        Returns own states (n, width, size)."""
        embedded = self.embedded(tokens)
        if states is None:
            states = mx.zeros((*tokens.shape, self._shape.tapped), embedded.dtype)
        hidden = states
        if states.shape[-1] == self._shape.tapped:
            hidden = self.fc(self.input_norm(states) if "input_norm" in self else states)
        caches = cache or [None] * len(self.layers)
        mask = create_attention_mask(hidden, caches[0])
        hidden = self.layers[0].pair(embedded, hidden, mask, caches[0])
        for layer, own in zip(self.layers[1:], caches[1:], strict=True):
            hidden = layer(hidden, mask, own)
        return hidden


class DFlash(TappedDrafter):
    """Taps become keys and values of each layer; a pass over the last token and masks drafts a
    block."""

    def __init__(self, shape: DrafterShape, shared: SharedLayers, taps: LayerTaps) -> None:
        super().__init__(shape, shared, taps)
        self.hidden_norm = nn.RMSNorm(shape.size, shape.eps)
        self.layers = [Layer(shape) for _ in shape.windows]

    def __call__(
        self, tokens: mx.array, states: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        """Write the taps (n, width, taps * dim) of tokens into the cache; or run a block of tokens
        (n, width). Returns (n, width, size)."""
        caches = cache or [None] * len(self.layers)
        if states is not None:
            context: mx.array = self.hidden_norm(self.fc(states))
            for layer, own in zip(self.layers, caches, strict=True):
                layer.self_attn.write(context, own)
            return context
        hidden = self.embedded(tokens)
        masks = [self._mask(index, tokens.shape[1], own) for index, own in enumerate(caches)]
        for layer, mask, own in zip(self.layers, masks, caches, strict=True):
            hidden = layer(hidden, mask, own)
        return hidden

    def _mask(self, index: int, width: int, cache: Any) -> Any:
        if cache is None:
            return None
        mask = cache.make_mask(width, return_array=True, window_size=self._shape.windows[index])
        if mask is None or self._shape.causal[index]:
            return mask
        # The block's last token sees all others. Padding is behind it.
        last = min(self._shape.block, width) - 1

        def cut(part: mx.array) -> mx.array:
            return part[..., last : last + 1, :]

        return cut(mask) if isinstance(mask, mx.array) else mask.changed(cut)


class MarkovHead(nn.Module):
    """Logits to add, by the token before."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        before, after = (shape.own_rows[f"markov_head.markov_w{part}"] for part in (1, 2))
        self.markov_w1 = nn.Embedding(before, shape.markov_rank)
        self.markov_w2 = nn.Linear(shape.markov_rank, after, bias=False)

    def __call__(self, before: mx.array) -> mx.array:
        added: mx.array = self.markov_w2(self.markov_w1(before))
        return added


class DSpark(DFlash):
    """DFlash whose tokens of a block depend on the one before each."""

    def __init__(self, shape: DrafterShape, shared: SharedLayers, taps: LayerTaps) -> None:
        super().__init__(shape, shared, taps)
        self.markov_head = MarkovHead(shape)

    def picked(self, states: mx.array, before: mx.array | None = None) -> mx.array:
        assert before is not None
        tokens, logits = [before], self.logits_of(states)
        for position in range(logits.shape[1]):
            tokens.append(self.best(logits[:, position] + self.markov_head(tokens[-1])))
        return mx.stack(tokens[1:], axis=1)
