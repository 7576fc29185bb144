"""A launched step: the lazy arrays that it gives, and its result once they are read."""

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
    """A launched step. Its arrays are references of their own, so later steps may change rows,
    blocks and sampling state."""

    plan: Plan
    at: float
    """Time of the launch (`time.perf_counter`), in seconds."""
    launch_s: float = 0.0
    """Seconds of the launch, without reads of earlier steps. The step takes no less: where the last
    step was read behind this launch, a fast device has finished by then."""
    prefilled: Prefilled
    persisted: list[BlockArrays]
    sampled: Sampled | None = None
    """None: no row decodes."""
    order: int = 0
    """Hash of the order of rows in their slots, if the plan has a digest; else 0."""
    banks: tuple[BankStats, ...] | None = None
    """The banks as this step leaves them, if the plan has `report_banks`."""
    spans: Spans | None = None
    """Positions of the drafts that the step verifies. The number of accepted drafts is known when
    the tokens are read."""
    draft_s: float = 0.0
    """Seconds that the proposers took."""
    preparing: bool = False
    """Whether the device prepared kernels or a graph for a pass of the step."""
    stepped: Stepped | None = None
    """The result, once the step was read."""

    @property
    def rows(self) -> tuple[RowId, ...]:
        """Rows that decode, in the order of their tokens."""
        return () if self.sampled is None else self.sampled.rows

    @property
    def has_first_tokens_alone(self) -> bool:
        """Whether rows have their first token in this step, and no others decode: rows whose prompt
        is complete are among `rows`."""
        return 0 < len(self.prefilled.complete) == len(self.rows)
