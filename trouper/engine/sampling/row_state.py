"""State of one row, except KV."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TypeAlias

import attrs
import numpy as np

from trouper.engine.embeddings.pooling import Pool
from trouper.engine.grammars.grammar_compiler import Grammars
from trouper.engine.grammars.token_masks import Constraint, Mask, mask_bytes
from trouper.engine.passes.region import Ints
from trouper.engine.sampling.dry import Repetitions
from trouper.engine.sampling.penalties import History
from trouper.engine.sampling.token_rows import RowTokens
from trouper.protocol.plans import Admit, Breakers, ThinkingLimit
from trouper.protocol.sampling import Sampling


class ThinkingRule:
    """Follows one row's thinking, and masks the next token as a grammar does."""

    fault = ""
    """A thinking budget cannot fail."""

    def __init__(
        self, limit: ThinkingLimit, vocabulary: int, min_tokens: int = 0, ends: Sequence[int] = ()
    ) -> None:
        """No token of `ends` is allowed before `min_tokens` tokens, except in the forced marker."""
        self._limit, self._min_tokens = limit, min_tokens
        self._size = mask_bytes(vocabulary)
        self._free = np.full(self._size, 255, np.uint8)
        self._early = self._free.copy()
        for token in ends:
            self._early[token // 8] &= 255 - (1 << token % 8)
        self._thinks = limit.begun
        self._over = False
        self._used = 0
        self._recent: tuple[int, ...] = ()

    def accept(self, token: int) -> str:
        """Returns "": no error is possible."""
        if self._over:
            return ""
        start, end = self._limit.start, self._limit.end
        self._recent = (*self._recent, token)[-max(len(start), len(end)) :]
        if self._thinks:
            self._used += 1
            self._over = self._recent[-len(end) :] == end
        else:
            self._thinks = self._recent[-len(start) :] == start
        return ""

    def fitting(self, draft: Sequence[int]) -> int:
        return len(draft)

    def along(self, draft: Sequence[int], drawn: int) -> list[Mask]:
        lookahead = copy(self)
        masks = [lookahead.allowed(drawn)]
        for index, token in enumerate(draft, 1):
            lookahead.accept(token)
            masks.append(lookahead.allowed(drawn + index))
        return masks

    def allowed(self, drawn: int) -> Mask:
        """Mask after `drawn` tokens of the answer. Thinking has a count of its own, since thinking
        may begin anywhere."""
        if self._over or not self._thinks or self._used < self._limit.tokens:
            return self._early if drawn < self._min_tokens else self._free
        forced = self._limit.end[self._written()]
        mask = np.zeros(self._size, np.uint8)
        mask[forced // 8] = 1 << (forced % 8)
        return mask

    def _written(self) -> int:
        """Number of the marker's tokens at the end of the text."""
        end = self._limit.end
        return next((n for n in range(len(end) - 1, 0, -1) if self._recent[-n:] == end[:n]), 0)


RowConstraint: TypeAlias = Constraint | ThinkingRule
"""Restricts a row's next token."""


@attrs.define(eq=False)
class RowState:
    prompt: Ints
    """Tokens to prefill, with earlier samples of a resumed row."""
    sampling: Sampling
    logprobs: int | None
    logprob_tokens: tuple[int, ...] = ()
    prefilled: int = 0
    drawn: int = 0
    """Number of sampled tokens, which keys the next draw."""
    history: History | None = None
    repetitions: Repetitions | None = None
    processors: tuple[str, ...] = ()
    tokens: RowTokens | None = None
    """For logits processors."""
    constraint: RowConstraint | None = None
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    pool: Pool | None = None
    """Of an embedded prompt."""
    second_at: int = 0


def admitted(admit: Admit, vocabulary: int, grammars: Grammars | None) -> RowState:
    """Make an admitted row's state. `vocabulary`: number of logits. Earlier samples of a resumed
    row count as output for penalties, grammar, thinking budget and draws."""
    # Ends beyond the logits are dropped: MLX would write out of bounds.
    prompt = np.frombuffer(admit.prompt, "<i4")
    given, output = np.split(prompt, [len(prompt) - admit.num_output_tokens])
    history = History(given, vocabulary, output) if admit.sampling.penalized else None
    repetitions = None
    if admit.sampling.dry:
        repetitions = Repetitions.of(
            prompt, admit.sampling, admit.breakers or Breakers(), vocabulary
        )
    ends = tuple(token for token in admit.ends if token < vocabulary)
    constraint = _constraint(admit, ends, vocabulary, grammars)
    if constraint is not None:
        for token in output.tolist():
            constraint.accept(token)
    return RowState(
        prompt,
        admit.sampling,
        admit.logprobs,
        drawn=admit.num_output_tokens,
        history=history,
        constraint=constraint,
        min_tokens=admit.min_tokens,
        ends=ends,
        prompt_logprobs=admit.prompt_logprobs,
        logprob_tokens=admit.logprob_tokens,
        pool=Pool(admit.embed) if admit.embed else None,
        second_at=admit.second_at,
        repetitions=repetitions,
        processors=admit.logits_processors,
        tokens=RowTokens.of(prompt) if admit.logits_processors else None,
    )


def _constraint(
    admit: Admit, ends: tuple[int, ...], vocabulary: int, grammars: Grammars | None
) -> RowConstraint | None:
    if admit.thinking is not None:
        return ThinkingRule(admit.thinking, vocabulary, admit.min_tokens, ends)
    if admit.grammar is None:
        return None
    assert grammars is not None, "grammars need a tokenizer"
    return grammars.constraint(admit.grammar, admit.min_tokens, ends)
