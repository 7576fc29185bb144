"""The check matrix: features whose scenarios fail are turned off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx
from mlx import nn

from trouper.engine.kv.quantized_kv import PLAIN, KvFormat
from trouper.engine.kv.rows import Rows, rows_for
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.passes.pass_shapes import Shapes
from trouper.engine.platform.error_text import line_of
from trouper.engine.self_check.accuracy import (
    ModelRun,
    Reference,
    WrongAloneError,
    arithmetic_of,
    described,
    random_texts,
    run_alone,
)
from trouper.engine.self_check.scenarios import (
    BATCH,
    FIRST_BANK,
    LENGTHS,
    MORE,
    ROW_BY_ROW,
    SINGLES,
    SLACK,
    ForcedRows,
    Scenario,
)
from trouper.protocol.capabilities import Capabilities, Feature
from trouper.protocol.plans import RowId

# Seeds of weights and texts. A scenario fails if both fail: a router may be undecided within
# rounding.
SEEDS = (1, 2)


@attrs.frozen
class Subject:
    """A model under test, with a reference."""

    model: nn.Module
    kv: KvFormat
    shapes: Shapes
    reference: Reference
    slack: int = SLACK

    def failure(self, scenario: Scenario, capabilities: Capabilities) -> Failure | None:
        """Run a scenario; None: passed. Any exception is a failure."""
        try:
            difference = self.error(scenario, capabilities)
        except Exception as error:  # noqa: BLE001
            # Any architecture's code: whatever it raises is the finding.
            return Failure(f"{scenario.name}: {line_of(error)}", raised=True)
        if difference <= self.reference.bound:
            return None
        return Failure(f"{scenario.name} differ: {described(difference, self.reference.bound)}")

    def error(self, scenario: Scenario, capabilities: Capabilities) -> float:
        """Return a scenario's error against the reference. Raises any exception of the model's
        code."""
        rows = ForcedRows(self._rows(capabilities, scenario.feature), self.reference.texts)
        scenario.script(rows)
        return rows.error(self.reference)

    def _rows(self, capabilities: Capabilities, feature: Feature) -> Rows:
        shapes = (
            attrs.evolve(self.shapes, first_bank=FIRST_BANK) if feature == "banks" else self.shapes
        )
        return rows_for(self.model, self.kv, self.slack, shapes, capabilities)[0]


@attrs.frozen
class Failure:
    """reason: one line. raised: by an exception, so no second seed is tried."""

    reason: str
    raised: bool = False


Agree = Callable[[Failure | None], Failure | None]
"""Combines the failures of all ranks. Every rank must call at the same points."""


def alone(failure: Failure | None) -> Failure | None:
    return failure


class Matrix:
    """Runs scenarios on up to two subjects."""

    def __init__(self, make: Callable[[int], Subject], agree: Agree = alone) -> None:
        """`make`: from a seed to a subject. Raises `WrongAloneError`, and any exception of the
        model's code."""
        self._make, self._agree = make, agree
        self._subjects: dict[int, Subject] = {}

    def subject(self, seed: int = SEEDS[0]) -> Subject:
        if seed not in self._subjects:
            self._subjects[seed] = self._make(seed)
        return self._subjects[seed]

    def capabilities(self, start: Capabilities) -> Capabilities:
        """Find the capabilities among those of `start`. Raises `WrongAloneError`."""
        found = start
        if found.allows("batch"):
            untried = start.without("prefill_together", "not tried yet").without(
                "banks", "not tried yet"
            )
            failure = self._first_failure(BATCH, untried)
            found = found if failure is None else found.without("batch", failure.reason)
        for scenario in MORE if found.allows("batch") else ():
            if found.allows(scenario.feature) and (failure := self.failure(scenario, found)):
                found = found.without(scenario.feature, failure.reason)
        if not found.allows("batch"):
            self.require_row_by_row(found)
        return found

    def require_row_by_row(self, found: Capabilities) -> None:
        """Check rows one by one. Raises `WrongAloneError`."""
        failure = self._first_failure(ROW_BY_ROW, found)
        if failure is not None:
            raise WrongAloneError(failure.reason)

    def _first_failure(
        self, scenarios: Sequence[Scenario], capabilities: Capabilities
    ) -> Failure | None:
        failures = (self.failure(scenario, capabilities) for scenario in scenarios)
        return next((failure for failure in failures if failure is not None), None)

    def failure(self, scenario: Scenario, capabilities: Capabilities) -> Failure | None:
        """Run a scenario with each seed; None: one passed."""
        for seed in SEEDS:
            found = self._agree(self.subject(seed).failure(scenario, capabilities))
            if found is None or found.raised:
                return found
        return found


def subject_of(
    model: nn.Module, vocabulary: int, seed: int, shapes: Shapes, kv: KvFormat = PLAIN
) -> Subject:
    """Raises `WrongAloneError`, and any exception of the model's code."""
    texts = random_texts(LENGTHS, vocabulary, seed)
    run = run_in_slots(model, kv, shapes) if kv.bits else run_alone(model)
    return Subject(model, kv, shapes, Reference(run, texts, arithmetic_of(model, kv), SINGLES))


def run_in_slots(model: nn.Module, kv: KvFormat, shapes: Shapes) -> ModelRun:
    """Make a function that runs one row in slots, the reference of quantized KV. Attention is
    MLX's, over arrays: the model may compute with keys."""
    lone = Capabilities(banks="a row alone")

    def run(tokens: Sequence[int], parts: Sequence[int]) -> mx.array:
        rows, row = SlotRows(model, lone, kv, SLACK, shapes), RowId(0)
        rows.open(row, len(tokens))
        at, logits = 0, []
        for part in parts:
            logits.append(rows.score(row, tokens[at : at + part]))
            at += part
        return mx.concatenate(logits)

    return run
