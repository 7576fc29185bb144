"""The weights of a checkpoint's MTP head: taken out before mlx-lm sees them, and named as `MtpHead`
names them.

mlx-lm's models have no head: most drop its weights, and DeepSeek's leave them in the way if a model
has not exactly 61 layers. Names and the order of a projection's input are those of the publishers'
checkpoints, as vLLM reads them (`glm4_moe_mtp.py`, `mimo_mtp.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import mlx.core as mx
from mlx_lm import utils

from trouper.engine.architectures.architecture_lookup import find_architecture

Weights = dict[str, mx.array]

NAMES = {
    "pre_fc_norm_embedding": "embedding_norm",
    "enorm": "embedding_norm",
    "token_layernorm": "embedding_norm",
    "pre_fc_norm_hidden": "hidden_norm",
    "hnorm": "hidden_norm",
    "hidden_layernorm": "hidden_norm",
    "fc": "projection",
    "eh_proj": "projection",
    "input_proj": "projection",
    "norm": "norm",
    "shared_head.norm": "norm",
    "final_layernorm": "norm",
}
"""Names of the head's own parts in checkpoints (of Qwen, of DeepSeek and GLM, of MiMo), and in
`MtpHead`. All others are its layer's."""
SHARED = ("shared_head.head.", "embed_tokens.", "lm_head.")
"""Copies of the model's own embeddings and output layer, with which the head was trained
(DeepSeek-V3's README_WEIGHTS.md)."""
QWEN = re.compile(
    r"(?:model\.)?(?:language_model\.)?(?:model\.)?mtp\.(?:layers\.(?P<layer>\d+)\.)?(?P<name>.+)"
)
DEEPSEEK = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<name>.+)")
MIMO = re.compile(r"model\.mtp_layers\.(?P<layer>\d+)\.(?P<name>.+)")
CONVOLUTION = "conv1d.weight"
"""By the form of this weight, in any layer, mlx-lm tells a converted checkpoint of Qwen3.5 from an
original one."""


@attrs.frozen
class HeadFamily:
    """How a family's checkpoints have heads. `pattern`: the names of their weights. `behind`:
    whether they are named as layers behind the last one. `array_mask`: see `MtpHead`.
    `hidden_first`: whether the projection's input begins with the hidden state."""

    pattern: re.Pattern[str]
    behind: bool = False
    array_mask: bool = False
    hidden_first: bool = False


FAMILIES = {
    "qwen3_next": HeadFamily(QWEN),
    "qwen3_5": HeadFamily(QWEN),
    "qwen3_5_moe": HeadFamily(QWEN),
    "deepseek_v3": HeadFamily(DEEPSEEK, behind=True, array_mask=True),
    "glm4_moe": HeadFamily(DEEPSEEK, behind=True),
    "glm4_moe_lite": HeadFamily(DEEPSEEK, behind=True, array_mask=True),
    "mimo": HeadFamily(MIMO, hidden_first=True),
}
"""By mlx-lm's module."""


def family_of(config: Mapping[str, Any]) -> HeadFamily | None:
    """Find how a model's checkpoint would have a head; None: in no way that is known here."""
    kind = str(config["model_type"])
    return FAMILIES.get(utils.MODEL_REMAPPING.get(kind, kind))


@attrs.define(eq=False)
class HeadWeights:
    """The weights of a checkpoint's first head, without their prefix; empty: it has none."""

    weights: Weights = attrs.field(factory=dict)
    convolution: mx.array | None = None
    """`CONVOLUTION` of some layer of the model."""

    def take(self, weights: Weights, family: HeadFamily, num_layers: int) -> Weights:
        """Take the weights of all heads, and return the others. Only the first head is kept: it is
        applied again for a longer draft."""
        remaining = dict[str, mx.array]()
        for name, weight in weights.items():
            match = family.pattern.fullmatch(name)
            layer = int(match["layer"] or 0) - num_layers * family.behind if match else -1
            if match is None or layer < 0:
                remaining[name] = weight
            elif layer == 0 and not match["name"].startswith(SHARED):
                self.weights[match["name"]] = weight
        self.convolution = next(
            (weight for name, weight in remaining.items() if name.endswith(CONVOLUTION)), None
        )
        return remaining


def classes_without_head(found: HeadWeights) -> Callable[[dict[str, Any]], tuple[Any, Any]]:
    """Make what finds `load_model` the classes of a model, for which weights of heads then do not
    exist; they go to `found`. The model is of mlx-lm's own class when it is loaded."""

    def get_model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
        architecture = find_architecture(config)
        kind, arguments = architecture.get_classes()
        family = family_of(config)
        if family is None or not architecture.native:
            return kind, arguments
        num_layers = (config.get("text_config") or config)["num_hidden_layers"]

        def sanitize(self: Any, weights: Weights) -> Any:
            self.__class__ = kind
            return self.sanitize(found.take(weights, family, num_layers))

        return type(
            kind.__name__, (kind,), {"sanitize": sanitize, "__module__": kind.__module__}
        ), arguments

    return get_model_classes
