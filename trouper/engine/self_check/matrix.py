"""The whole check of one model: every scenario, and what is left when those that fail have turned their features off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx
from mlx import nn

from trouper.engine.kv.pass_shapes import Shapes
from trouper.engine.kv.quantized_kv import PLAIN, KvFormat
from trouper.engine.kv.slot_rows import Rows, SlotRows, rows_for
from trouper.engine.platform.error_text import line_of
from trouper.engine.self_check.accuracy import arithmetic_of
from trouper.engine.self_check.alone import ModelRun, Reference, WrongAloneError, random_texts, run_alone
from trouper.engine.self_check.forced import ForcedRows
from trouper.engine.self_check.scenarios import BATCH, LENGTHS, MORE, ROW_BY_ROW, SINGLES, SLACK, Scenario
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.plans import RowId

SEEDS = (1, 2)
"""A scenario that only differs is tried again with other weights and texts: it fails if it differs there, too. A router of
experts that is undecided between two of them within rounding is no fault of the batch."""


@attrs.frozen
class Subject:
    """A model that is checked, with what its rows must answer."""

    model: nn.Module
    kv: KvFormat
    shapes: Shapes
    reference: Reference
    slack: int = SLACK

    def failure(self, scenario: Scenario, capabilities: Capabilities) -> Failure | None:
        """Any exception counts: what a request would have met."""
        try:
            rows = ForcedRows(self._rows(capabilities), self.reference.texts)
            scenario.script(rows)
            apart = rows.apart(self.reference)
        except Exception as error:  # noqa: BLE001 - any architecture's code: whatever it raises is the finding
            return Failure(f"{scenario.name}: {line_of(error)}", raised=True)
        if apart <= self.reference.bound:
            return None
        return Failure(f"{scenario.name} differ: {_apart(apart, self.reference.bound)}")

    def _rows(self, capabilities: Capabilities) -> Rows:
        return rows_for(self.model, self.kv, self.slack, self.shapes, capabilities)[0]


@attrs.frozen
class Failure:
    """reason: one line. raised: an error, which needs no second opinion."""

    reason: str
    raised: bool = False


Agree = Callable[[Failure | None], Failure | None]
"""What all ranks make of one rank's finding. Every rank asks at the same places."""


def alone(failure: Failure | None) -> Failure | None:
    """There are no other ranks."""
    return failure


def _apart(apart: float, bound: float) -> str:
    return f"log-probabilities by {apart:.2g} of the logits' spread, where rounding makes up to {bound:.2g}"


class Matrix:
    """Plays scenarios on up to two subjects, which are made when they are needed."""

    def __init__(self, make: Callable[[int], Subject], agree: Agree = alone) -> None:
        """`make`: from a seed. Raises `WrongAloneError`, and whatever the model's own code raises."""
        self._make, self._agree = make, agree
        self._subjects: dict[int, Subject] = {}

    def subject(self, seed: int = SEEDS[0]) -> Subject:
        if seed not in self._subjects:
            self._subjects[seed] = self._make(seed)
        return self._subjects[seed]

    def capabilities(self, start: Capabilities) -> Capabilities:
        """`start`: what is off already is not tried. Raises `WrongAloneError` if rows are wrong even one by one."""
        found = start
        if found.allows("batch"):
            failure = self._first_failure(BATCH, start.without("prefill_together", "not tried yet"))
            found = found if failure is None else found.without("batch", failure.reason)
        for scenario in MORE if found.allows("batch") else ():
            if found.allows(scenario.feature) and (failure := self.failure(scenario, found)):
                found = found.without(scenario.feature, failure.reason)
        if not found.allows("batch"):
            self.require_row_by_row(found)
        return found

    def require_row_by_row(self, found: Capabilities) -> None:
        """Raises `WrongAloneError`."""
        failure = self._first_failure(ROW_BY_ROW, found)
        if failure is not None:
            raise WrongAloneError(failure.reason)

    def _first_failure(self, scenarios: Sequence[Scenario], capabilities: Capabilities) -> Failure | None:
        failures = (self.failure(scenario, capabilities) for scenario in scenarios)
        return next((failure for failure in failures if failure is not None), None)

    def failure(self, scenario: Scenario, capabilities: Capabilities) -> Failure | None:
        for seed in SEEDS:
            found = self._agree(self.subject(seed).failure(scenario, capabilities))
            if found is None or found.raised:
                return found
        return found


def subject_of(model: nn.Module, vocabulary: int, seed: int, shapes: Shapes, kv: KvFormat = PLAIN) -> Subject:
    """For the whole matrix. Raises `WrongAloneError`, and what the model's code raises."""
    texts = random_texts(LENGTHS, vocabulary, seed)
    run = run_in_slots(model, kv, shapes) if kv.bits else run_alone(model)
    return Subject(model, kv, shapes, Reference(run, texts, arithmetic_of(model, kv), SINGLES))


def run_in_slots(model: nn.Module, kv: KvFormat, shapes: Shapes) -> ModelRun:
    """One row in our slots: with quantized KV no code but ours computes what a row must answer."""

    def run(tokens: Sequence[int], parts: Sequence[int]) -> mx.array:
        rows, row = SlotRows(model, Capabilities(), kv, SLACK, shapes), RowId(0)
        rows.open(row)
        at, logits = 0, []
        for part in parts:
            logits.append(rows.score(row, tokens[at : at + part]))
            at += part
        return mx.concatenate(logits)

    return run
