"""What the engine keeps of one row besides its KV."""

from __future__ import annotations

import attrs
import numpy as np

from trouper.engine.grammars.grammar_compiler import Constraint
from trouper.engine.pooling import Pool
from trouper.engine.sampling.penalties import History
from trouper.engine.sampling.thinking_budget import ThinkingRule
from trouper.protocol.sampling import Sampling


@attrs.define(eq=False)
class RowState:
    """What the engine keeps of one row besides its KV."""

    prompt: np.ndarray[tuple[int], np.dtype[np.int32]]
    """Tokens to prefill: the prompt, and what the row had sampled when it left the engine before."""
    sampling: Sampling
    logprobs: int | None
    prefilled: int = 0
    drawn: int = 0
    """Tokens sampled so far: the position that keys the next draw."""
    history: History | None = None
    constraint: Constraint | ThinkingRule | None = None
    """What bounds its next token, by the tokens before."""
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    pool: Pool | None = None
    """Its prompt is embedded."""
