"""Text modules of mlx-vlm, played as the server would run them: with what the self-check leaves of
their features, on devices with exact shapes and on those that round them up."""

from __future__ import annotations

import re

import attrs
import mlx.core as mx
from mlx import nn

from tests.family_configs import VOCABULARY
from tests.zoo.building import filled
from tests.zoo.mixes import ALL_SHAPES, Outcome, play_all
from tests.zoo.vlm_catalogue import config_of
from trouper.engine.architectures import vlm_models
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.passes.pass_shapes import EXACT, ROUNDED, Shapes
from trouper.engine.self_check.accuracy import WrongAloneError
from trouper.engine.self_check.checking import Check
from trouper.protocol.capabilities import FEATURES, Capabilities


@attrs.frozen
class Played:
    """What one module showed. `capabilities`: what any device leaves. `refused`: the self-check's
    reason; then nothing was played."""

    name: str
    capabilities: Capabilities = attrs.field(factory=Capabilities)
    refused: str = ""
    errors: tuple[float, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def is_batched(self) -> bool:
        return not self.refused and self.capabilities.allows("batch")

    @property
    def reason(self) -> str:
        """Why it is refused or runs one by one, without figures and a kernel's arguments; "": it is
        batched."""
        text = self.refused or self.capabilities.batch
        return re.split(r" \(they differ|: incompatible|: log-prob", text)[0]


def build(name: str, **changes: object) -> tuple[nn.Module, dict[str, object]]:
    """The module's model as the server makes it, float32, with its config. `changes`: other values
    of the config."""
    config = config_of(name) | changes
    model_class, args_class = vlm_models.text_classes(config)
    mx.random.seed(0)
    model: nn.Module = model_class(args_class.from_dict(config))
    model.set_dtype(mx.float32)
    return filled(model), config


def check(model: nn.Module, config: dict[str, object], shapes: Shapes) -> Capabilities:
    """What the self-check of a start leaves. Raises `WrongAloneError`."""
    return Check(model, config, VOCABULARY, PLAIN, "fast", shapes=shapes).run().capabilities


def look_at(name: str) -> Played:
    model, config = build(name)
    try:
        allowed = {
            kind: check(model, config, shapes)
            for kind, shapes in (("exact", EXACT), ("rounded", ROUNDED))
        }
    except WrongAloneError as error:
        return Played(name, refused=str(error))
    errors, faults = list[float](), list[str]()
    for kind, shapes in ALL_SHAPES.items():
        capabilities = allowed["rounded" if kind == "rounded" else "exact"]
        _, outcome = play_all(model, shapes, capabilities)
        errors += outcome.errors.values()
        faults += _faults(kind, outcome)
    everywhere = allowed["exact"]
    for feature in FEATURES:
        if reason := getattr(allowed["rounded"], feature):
            everywhere = everywhere.without(feature, reason)
    return Played(name, everywhere, "", tuple(errors), tuple(faults))


def _faults(kind: str, outcome: Outcome) -> list[str]:
    wrong = [f"{mix}, {kind} shapes: off by {error:.2g}" for mix, error in outcome.wrong.items()]
    return wrong + [f"{mix}, {kind} shapes: {text}" for mix, text in outcome.crashes.items()]
