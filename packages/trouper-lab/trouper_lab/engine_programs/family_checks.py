"""The self-check's scenarios on tiny random models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import mlx.core as mx
from mlx import nn

from trouper.engine.adaptations.adaptation_registry import adapted
from trouper.engine.kv.rows import rows_for
from trouper.engine.passes.pass_shapes import of_device
from trouper.engine.platform.error_text import line_of
from trouper.engine.self_check.matrix import SEEDS, Subject, subject_of
from trouper.engine.self_check.scenarios import BATCH, MORE, Scenario
from trouper.protocol.capabilities import Capabilities
from trouper_lab.engine_programs.family_configs import VOCABULARY
from trouper_lab.engine_programs.tiny_families import SEEDS as FAMILY_SEEDS
from trouper_lab.engine_programs.tiny_families import build

Row = dict[str, Any]
FORMATS: dict[str, dict[str, Any]] = {
    "4 bits": {"bits": 4, "group_size": 32},
    "8 bits": {"bits": 8, "group_size": 32},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
}
"""Tiny weights are 64 and 128 wide: groups of 32 avoid single groups."""
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
NO_KERNEL = "No implementation for problem shape"
"""MLX on CUDA lacks kernels for narrow packed products."""


def check(name: str, quantized: str = "", dtype: str = "float32") -> Row:
    """`quantized`: weights stay packed, also on a CPU."""
    row: Row = {"family": name, "weights": " ".join(part for part in (quantized, dtype) if part)}
    try:
        found = list(scenario_errors(partial(_subject, name, quantized, dtype)))
    except Exception as error:  # noqa: BLE001 - any architecture's code on any device: whatever it raises is the finding
        return row | _unknown(line_of(error), quantized)
    if without := next((each.problem for each in found if NO_KERNEL in each.problem), ""):
        return row | _unknown(without, quantized)
    run = [each for each in found if each.error is not None]
    worst = max(run, key=lambda each: (each.error or 0.0) / each.bound, default=None)
    return row | {
        "error": worst and worst.error,
        "bound": worst.bound if worst else 0.0,
        "scenarios": len(run),
        "differs": "; ".join(each.problem or each.scenario for each in found if not each.held),
        "off": sorted({each.feature for each in found if each.off}),
    }


def _unknown(problem: str, quantized: str) -> Row:
    no_kernel = bool(quantized) and NO_KERNEL in problem
    return {
        "error": None,
        "bound": 0.0,
        "differs": "" if no_kernel else problem,
        "off": [],
        "no_kernel": no_kernel,
    }


def _subject(name: str, quantized: str, dtype: str, seed: int) -> Subject:
    model = build(name, None if seed == SEEDS[0] else FAMILY_SEEDS.get(name, 0) + seed)
    model.set_dtype(DTYPES[dtype])
    if quantized:
        nn.quantize(
            model,
            class_predicate=partial(_fits, FORMATS[quantized]["group_size"]),
            **FORMATS[quantized],
        )
    adapted(model)
    mx.eval(model.parameters())
    return subject_of(model, VOCABULARY, seed, of_device())


def _fits(group: int, _: str, module: nn.Module) -> bool:
    """Whether groups divide a layer's rows; others stay plain."""
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % group == 0


def rows_of(subject: Subject) -> Iterator[Row]:
    for each in scenario_errors(lambda _: subject):
        yield attrs.asdict(each) | {"held": each.held}


@attrs.frozen(kw_only=True)
class ScenarioError:
    """error: see `self_check.accuracy`; None: not run, or raised. bound: by rounding.
    off: the model does not allow the feature."""

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
    """`make`: a subject from a seed. Beyond a bound, the next seed decides: routers may waver."""
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
