"""Drafts of a smaller model with the same vocabulary, which continues each row greedily: as
mlx-lm's `speculative_generate_step`, but one pass drafts a token for all rows. A row that rests
runs no pass; later passes catch up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, gather_last_axis
from mlx_lm.models.cache import KVCache

from trouper.engine.kv.draft_rows import DraftRows
from trouper.protocol.plans import ProposerName, RowId

FED_AT_ONCE = 2
"""Maximum number of tokens in the first pass of a draft. After an accepted draft a row lacks
two."""


@attrs.frozen(kw_only=True)
class DraftLimits:
    context: int = sys.maxsize
    """Maximum number of tokens of a row that the draft model drafts for."""
    num_tokens: int = sys.maxsize
    """Number of logits of the draft model, which runs a larger token as its last one."""
    target_tokens: int = sys.maxsize
    """Number of logits of the target. A draft ends before a larger token."""


NO_DRAFT_LIMITS = DraftLimits()


class DraftModel:
    def __init__(
        self,
        rows: DraftRows,
        max_tokens: int,
        agree: Callable[[mx.array], mx.array],
        limits: DraftLimits,
    ) -> None:
        """`max_tokens`: maximum length of a draft. `agree` returns rank 0's tokens."""
        self._rows, self._max_tokens, self._agree, self._limits = rows, max_tokens, agree, limits
        self._tokens: dict[RowId, list[int]] = {}
        self._ahead: dict[RowId, list[int]] = {}
        """Drafted tokens that the draft model has run behind the committed ones."""

    def open(self, row: RowId, prompt: Sequence[int], restored: int) -> None:
        self._tokens[row] = list(prompt)
        self._rows.lengths[row] = min(restored, self._limits.context)

    def drop(self, rows: Iterable[RowId]) -> None:
        for row in rows:
            self._ahead.pop(row, None)
            if self._tokens.pop(row, None) is not None:
                del self._rows.lengths[row]

    def append(self, tokens: Mapping[RowId, Sequence[int]]) -> None:
        """Add committed tokens, and take back the KV of rejected drafts."""
        for row, more in tokens.items():
            if row not in self._tokens:
                continue
            if (ahead := self._ahead.pop(row, None)) is not None:
                pairs = zip(ahead, more[:-1], strict=False)  # The last one begins the next draft.
                kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                self._rows.lengths[row] = len(self._tokens[row]) + kept
            self._tokens[row] += more

    def drafts(self, requests: Mapping[RowId, int]) -> dict[RowId, list[int]]:
        """Draft for rows that have room: prefill what they lack but the last tokens, then propose.
        A draft ends before a token that the target lacks."""
        sizes = {
            row: self._bounded(row, size) for row, size in requests.items() if row in self._tokens
        }
        sizes = {row: size for row, size in sizes.items() if size > 0}
        if not sizes:
            return {}
        lacking = {row: self._lacking(row, len(self._tokens[row])) for row in sizes}
        self._rows.prefill(
            {row: tokens[:-1] for row, tokens in lacking.items() if len(tokens) > FED_AT_ONCE}
        )
        fed = {
            row: tokens if len(tokens) <= FED_AT_ONCE else tokens[-1:]
            for row, tokens in lacking.items()
        }
        drafts = self._rows.propose(fed, sizes, self._agree)
        self._ahead |= {row: draft[:-1] for row, draft in drafts.items()}
        known = {row: self._known_to_target(draft) for row, draft in drafts.items()}
        return {row: draft for row, draft in known.items() if draft}

    def _bounded(self, row: RowId, size: int) -> int:
        """Bound a draft so that all its tokens but the last fit into the context. May return less
        than 1."""
        return min(size, self._max_tokens, self._limits.context - len(self._tokens[row]) + 1)

    def _known_to_target(self, draft: list[int]) -> list[int]:
        return [*takewhile(lambda token: token < self._limits.target_tokens, draft)]

    def complete(self, ends: Mapping[RowId, int]) -> None:
        """Compute the KV of each row's first `ends[row]` tokens, before it is copied. Tokens behind
        the draft model's context have none."""
        self._rows.prefill(
            {row: self._lacking(row, end) for row, end in ends.items() if row in self._tokens}
        )

    def _lacking(self, row: RowId, end: int) -> list[int]:
        lacking = self._tokens[row][self._rows.lengths[row] : min(end, self._limits.context)]
        last = self._limits.num_tokens - 1
        return [min(token, last) for token in lacking]


@attrs.frozen(eq=False)
class SharedLayers:
    """Parts of a model that its head shares. No module, since the parameters are the model's."""

    model: nn.Module
    body: nn.Module
    """The model without its output layer. Returns hidden states after the last norm."""

    def embedded(self, tokens: mx.array) -> mx.array:
        embedded: mx.array = self.embedding(tokens)
        return embedded

    @property
    def embedding(self) -> Any:
        """The body's embedding layer. Raises `StopIteration` without one."""
        return next(layer for layer in self.body.children().values() if hasattr(layer, "as_linear"))

    def logits_of(self, states: mx.array) -> mx.array:
        """Run the model's output layer over hidden states (n, width, dim), without scales and
        bounds of logits, which change no order."""
        owner: Any = getattr(self.model, "language_model", self.model)
        if "lm_head" not in owner:
            tied: mx.array = self.embedding.as_linear(states)
            return tied
        logits: mx.array = owner.lm_head(states)
        # Qwen3.5's output layer is sharded over the vocabulary.
        group = getattr(owner, "sharding_group", None)
        return logits if group is None else gather_last_axis(logits, group)


class MtpHead(nn.Module):
    """A model's head. Implements `kv.head_rows.TargetHead`."""

    proposer: ProposerName = "mtp"
    block = mask_token = 0
    anchored = False

    def __init__(
        self,
        layer: nn.Module,
        norm: nn.Module,
        size: int,
        shared: SharedLayers,
        *,
        array_mask: bool,
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
        return self._size * int(self.hidden_norm.weight.dtype.size)

    def make_cache(self) -> list[Any]:
        """Make the cache of one row, as mlx-lm's models do."""
        return [KVCache()]

    def logits_of(self, states: mx.array) -> mx.array:
        return self._shared.logits_of(states)

    def picked(self, states: mx.array, before: mx.array | None = None) -> mx.array:  # noqa: ARG002
        return mx.argmax(self.logits_of(states), axis=-1)

    def target_states(self, tokens: mx.array, cache: Any) -> mx.array:
        states: mx.array = self._shared.body(tokens, cache=cache)
        return states

    def split(self, outputs: mx.array) -> tuple[mx.array, mx.array]:
        return outputs, self.logits_of(outputs)
