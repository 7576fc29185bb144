"""How far rows in company are from the row alone: the scenarios of the self-check, with the error
of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs

from trouper.engine.kv.rows import rows_for
from trouper.engine.platform.error_text import line_of
from trouper.engine.self_check.matrix import SEEDS, Subject
from trouper.engine.self_check.scenarios import BATCH, MORE, Scenario
from trouper.protocol.capabilities import Capabilities


@attrs.frozen(kw_only=True)
class ScenarioError:
    """One scenario. error: see `self_check.accuracy`; None if it was not run or raised. bound: an
    error up to it is rounding. problem: why there is no error. off: the model's caches or its code
    are known not to allow the feature, so nothing was run."""

    feature: str
    scenario: str
    error: float | None = None
    bound: float = 0.0
    problem: str = ""
    off: bool = False

    @property
    def held(self) -> bool:
        return self.off or (self.error is not None and self.error <= self.bound)


def scenario_errors(make: Callable[[int], Subject]) -> Iterator[ScenarioError]:
    """Yield each scenario of one model. `make`: a subject from a seed; a scenario beyond its bound
    is run again with the next seed, as the self-check does it: a router that is undecided between
    two experts within rounding is no fault of the batch."""
    first = make(SEEDS[0])
    subjects = {SEEDS[0]: first}
    allowed = rows_for(first.model, first.kv, first.slack, first.shapes, None)[1]
    unpadded = allowed.without("prefill_together", "has scenarios of its own")
    for scenario in (*BATCH, *MORE):
        if not allowed.allows(scenario.feature):
            reason = allowed.off[scenario.feature]
            yield ScenarioError(
                feature=scenario.feature, scenario=scenario.name, problem=reason, off=True
            )
            continue
        capabilities = unpadded if scenario in BATCH else allowed
        found = _measured(subjects[SEEDS[0]], scenario, capabilities)
        if not found.held and not found.problem:
            subjects.setdefault(SEEDS[1], make(SEEDS[1]))
            found = _measured(subjects[SEEDS[1]], scenario, capabilities)
        yield found


def _measured(subject: Subject, scenario: Scenario, capabilities: Capabilities) -> ScenarioError:
    names: dict[str, Any] = {"feature": scenario.feature, "scenario": scenario.name}
    try:
        error = subject.error(scenario, capabilities)
    except Exception as problem:  # noqa: BLE001 - any architecture's code on any device: whatever it raises is the finding
        return ScenarioError(**names, problem=line_of(problem))
    return ScenarioError(**names, error=error, bound=subject.reference.bound)
