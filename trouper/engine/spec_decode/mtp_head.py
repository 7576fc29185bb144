"""An MTP head (multi-token prediction): one more decoder layer, which drafts the tokens behind the
next one (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2).

The input is a projection of two normed vectors: the embedding of a token, then the model's hidden
state of the token before, after the model's last norm as in vLLM and SGLang (`qwen3_next_mtp.py`,
`deepseek_mtp.py`, `deepseek_nextn.py`). A longer draft applies the head again to its own hidden
state after the norm, as SGLang does; vLLM gives DeepSeek's head the state before the norm.
"""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, gather_last_axis
from mlx_lm.models.cache import KVCache


@attrs.frozen(eq=False)
class SharedParts:
    """Parts of a model that its head shares. No module, since the parameters are the model's."""

    model: nn.Module
    body: nn.Module
    """The model without its output layer. Returns hidden states after the last norm."""

    def embedded(self, tokens: mx.array) -> mx.array:
        embedded: mx.array = self.body.embed_tokens(tokens)
        return embedded

    def logits_of(self, states: mx.array) -> mx.array:
        """Run the model's output layer over hidden states (n, width, dim), as the models of
        `loading/head_weights.FAMILIES` do."""
        owner: Any = getattr(self.model, "language_model", self.model)
        if "lm_head" not in owner:
            tied: mx.array = self.body.embed_tokens.as_linear(states)
            return tied
        logits: mx.array = owner.lm_head(states)
        # Qwen3.5's output layer is sharded over the vocabulary.
        group = getattr(owner, "sharding_group", None)
        return logits if group is None else gather_last_axis(logits, group)


class MtpHead(nn.Module):
    """A model's head. Implements `kv.head_rows.TargetHead`."""

    def __init__(
        self, layer: nn.Module, norm: nn.Module, size: int, shared: SharedParts, *, array_mask: bool
    ) -> None:
        """`layer`: a decoder layer of the family. `norm`: the head's last norm. `size`: dimension
        of hidden states. `array_mask`: whether the layer needs an array as mask."""
        super().__init__()
        self.embedding_norm = nn.RMSNorm(size, norm.eps)
        self.hidden_norm = nn.RMSNorm(size, norm.eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.layer, self.norm = layer, norm
        self._shared, self._size, self._array_mask = shared, size, array_mask

    def __call__(
        self, tokens: mx.array, states: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        """Run tokens (n, width) with the hidden states (n, width, dim) of the tokens before each;
        None: zeros. Returns the hidden states that predict the tokens behind."""
        embedded = self._shared.embedded(tokens)
        if states is None:
            states = mx.zeros(embedded.shape, embedded.dtype)
        pair = mx.concatenate([self.embedding_norm(embedded), self.hidden_norm(states)], axis=-1)
        hidden = self.projection(pair)
        own = cache[0] if cache is not None else None
        mask = create_attention_mask(hidden, own, return_array=self._array_mask)
        out: mx.array = self.norm(self.layer(hidden, mask=mask, cache=own))
        return out

    @property
    def state_bytes(self) -> int:
        """Bytes of one hidden state."""
        return self._size * int(self.hidden_norm.weight.dtype.size)

    def make_cache(self) -> list[Any]:
        """Make the cache of one row, as mlx-lm's models do."""
        return [KVCache()]

    def logits_of(self, states: mx.array) -> mx.array:
        return self._shared.logits_of(states)

    def target_states(self, tokens: mx.array, cache: Any) -> mx.array:
        states: mx.array = self._shared.body(tokens, cache=cache)
        return states
