"""A launched step: lazy arrays, and the result once read."""

from __future__ import annotations

import attrs

from trouper.engine.kv.block_payloads import BlockArrays
from trouper.engine.prefill import Prefilled
from trouper.engine.sampling.sampled import Sampled
from trouper.engine.spec_decode.verification_spans import Spans
from trouper.protocol.kv import BankStats
from trouper.protocol.plans import Plan, RowId, Stepped


@attrs.define(eq=False, kw_only=True)
class Launched:
    """Holds array references of its own: later steps may change rows, blocks and sampling state."""

    plan: Plan
    at: float
    """`time.perf_counter`, in seconds."""
    launch_s: float = 0.0
    """Seconds of the launch, without reads of earlier steps: a lower bound of the step's time."""
    prefilled: Prefilled
    persisted: list[BlockArrays]
    sampled: Sampled | None = None
    """None: no row decodes."""
    order: int = 0
    """Hash of slots, if the plan has a digest; else 0."""
    banks: tuple[BankStats, ...] | None = None
    """Banks after this step, if the plan has `report_banks`."""
    spans: Spans | None = None
    """Positions of the drafts to verify."""
    draft_s: float = 0.0
    """Seconds of the proposers."""
    preparing: bool = False
    stepped: Stepped | None = None

    @property
    def rows(self) -> tuple[RowId, ...]:
        return () if self.sampled is None else self.sampled.rows

    @property
    def has_first_tokens_alone(self) -> bool:
        """Whether all decoding rows get a first token; rows with a complete prompt are among
        `rows`."""
        return 0 < len(self.prefilled.complete) == len(self.rows)
