"""State of one row, except KV."""

from __future__ import annotations

from typing import TypeAlias

import attrs
import numpy as np

from trouper.engine.embeddings.pooling import Pool
from trouper.engine.grammars.grammar_compiler import Grammars
from trouper.engine.grammars.token_masks import Constraint
from trouper.engine.passes.region import Ints
from trouper.engine.sampling.dry import Repetitions
from trouper.engine.sampling.penalties import History
from trouper.engine.sampling.thinking_budget import ThinkingRule
from trouper.engine.sampling.token_rows import RowTokens
from trouper.protocol.plans import Admit, Breakers
from trouper.protocol.sampling import Sampling

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
    """Names of logits processors."""
    tokens: RowTokens | None = None
    """For logits processors."""
    constraint: RowConstraint | None = None
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    pool: Pool | None = None
    """Pooled hidden states of an embedded prompt."""


def admitted(admit: Admit, vocabulary: int, grammars: Grammars | None) -> RowState:
    """Make an admitted row's state. `vocabulary`: number of logits. Earlier samples of a resumed
    row count as output for penalties, grammar, thinking budget and draws. Ends beyond the logits
    are dropped: MLX would write out of bounds."""
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
