"""The ordered stream of plans from Scheduler to ModelStepper, and what comes back.

A plan is everything that one engine step does. It is deterministic: clocks, randomness, withdrawal
and every choice of size have already been turned into data, so that another rank that replays the
same plans computes the same thing. Protocol: each plan is answered by one `Stepped`, in order, and
at most `PLANS_IN_FLIGHT` are unanswered. The engine launches plan n before it reads the tokens of
plan n-1, so it answers n-1 only when n has arrived; a plan without work flushes the pipeline.
"""

from __future__ import annotations

from typing import NewType

import attrs

from trouper.protocol.replies import TokenLogprobs
from trouper.protocol.sampling import Sampling

RowId = NewType("RowId", int)

PLANS_IN_FLIGHT = 2
"""One that computes and one whose tokens are about to be read."""


@attrs.frozen
class Admit:
    """A row enters the engine. `prompt` is little-endian int32 bytes, the cheap way to carry many tokens."""

    row: RowId
    prompt: bytes
    sampling: Sampling
    logprobs: int | None = None


@attrs.frozen
class Chunk:
    """Prefill this many more of the row's prompt tokens. With the last of them the row samples its first token."""

    row: RowId
    tokens: int


@attrs.frozen
class Plan:
    """One step. Order within it: drop, admit, decode one token for each of `decode`, prefill the chunks."""

    step: int
    drop: tuple[RowId, ...] = ()
    admit: tuple[Admit, ...] = ()
    decode: tuple[RowId, ...] = ()
    prefill: tuple[Chunk, ...] = ()
    release_memory: bool = False
    """Give the allocator's spare buffers back to the system before this step."""

    @property
    def has_work(self) -> bool:
        return bool(self.decode or self.prefill)


@attrs.frozen
class Stepped:
    """What a plan produced: one token for each decoded row and for each row whose prompt ended in this step.

    `decode_s` and `prefill_s` are measured seconds of device time, as far as the device lets them
    be told apart; they size the next chunks.
    """

    step: int
    rows: tuple[RowId, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[tuple[RowId, TokenLogprobs], ...] = ()
    seconds: float = 0.0
    """From launch, or from the end of the previous step if that was later, to this step's tokens."""
