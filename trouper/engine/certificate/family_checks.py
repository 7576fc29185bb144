"""The family matrix: every scenario on a tiny random model of each family, plain and with quantized
weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import mlx.core as mx
from mlx import nn

from trouper.engine.adaptations.adaptation_registry import adapted
from trouper.engine.certificate.family_configs import VOCABULARY
from trouper.engine.certificate.scenario_errors import scenario_errors
from trouper.engine.certificate.tiny_families import SEEDS as FAMILY_SEEDS
from trouper.engine.certificate.tiny_families import build
from trouper.engine.kv.pass_shapes import of_device
from trouper.engine.platform.error_text import line_of
from trouper.engine.self_check.matrix import SEEDS, Subject, subject_of

Row = dict[str, Any]
FORMATS: dict[str, dict[str, Any]] = {
    "4 bits": {"bits": 4, "group_size": 32},
    "8 bits": {"bits": 8, "group_size": 32},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
}
"""Weights of the tiny models are 64 and 128 wide: groups of 32 leave no row with a single group."""
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
NO_KERNEL = "No implementation for problem shape"
"""MLX on CUDA has no kernel of packed weights for products as narrow as a tiny model's: of the
packed floating-point formats, and of 16 columns in any."""


def check(name: str, quantized: str = "", dtype: str = "float32") -> Row:
    """Check one family. The row has its largest error, the bound there, and what differs. With
    `quantized`, weights are packed in that format and stay so, on a CPU, too."""
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
    """The rest of a row of a model that could not be compared. For packed weights that MLX has no
    kernel for, nothing differs."""
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
    """Whether groups divide a layer's rows: what they do not stays plain, as mlx-lm's converter
    leaves it."""
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % group == 0


def rows_of(subject: Subject) -> Iterator[Row]:
    """Yield each scenario of a model that is loaded already, as a row."""
    for each in scenario_errors(lambda _: subject):
        yield attrs.asdict(each) | {"held": each.held}
