"""State of one row in the engine, except its KV."""

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
    """Prompt, sampling parameters and sampling state of one row."""

    prompt: np.ndarray[tuple[int], np.dtype[np.int32]]
    """Tokens to prefill: the prompt, and for a row that resumes the tokens that it had sampled."""
    sampling: Sampling
    logprobs: int | None
    prefilled: int = 0
    drawn: int = 0
    """Number of sampled tokens: the position that keys the next draw."""
    history: History | None = None
    constraint: Constraint | ThinkingRule | None = None
    """Grammar or thinking budget that restricts the row's next token."""
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    pool: Pool | None = None
    """Pooled hidden states of a row whose prompt is embedded; None for other rows."""
