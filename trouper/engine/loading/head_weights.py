"""Weights of a checkpoint's MTP head.

mlx-lm's models drop heads, DeepSeek's for 61 layers only. Names and the projection's order: vLLM's
`glm4_moe_mtp.py`, `mimo_mtp.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import mlx.core as mx
from mlx import nn
from mlx_lm import utils

from trouper.engine.architectures.architecture_lookup import find_architecture, get_classes
from trouper.storage.checkpoint_files import weight_files

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
"""The head's parts in checkpoints (Qwen, DeepSeek and GLM, MiMo), and in `MtpHead`."""

# The model's own, copied (DeepSeek-V3's README_WEIGHTS.md).
SHARED = ("shared_head.head.", "embed_tokens.", "lm_head.")
QWEN = re.compile(
    r"(?:model\.)?(?:language_model\.)?(?:model\.)?mtp\.(?:layers\.(?P<layer>\d+)\.)?(?P<name>.+)"
)
DEEPSEEK = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<name>.+)")
MIMO = re.compile(r"model\.mtp_layers\.(?P<layer>\d+)\.(?P<name>.+)")
UNKNOWN = re.compile(r"(^|\.)mtp(_layers)?\.")  # In checkpoints of most other families.

# By this weight's form mlx-lm recognises a converted checkpoint of Qwen3.5.
CONVOLUTION = "conv1d.weight"


@attrs.frozen
class HeadFamily:
    """`pattern`: of names. `behind`: named as layers behind the last. `array_mask`: see `MtpHead`.
    `hidden_first`: the projection's input begins with the hidden state."""

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
    if not find_architecture(config).native:
        return None
    kind = str(config["model_type"])
    return FAMILIES.get(utils.MODEL_REMAPPING.get(kind, kind))


@attrs.define(eq=False)
class HeadWeights:
    """Without prefix; empty: no head."""

    weights: Weights = attrs.field(factory=dict)
    convolution: mx.array | None = None
    """Any layer's."""
    unknown: bool = False


def read_head_weights(directory: Path, config: Mapping[str, Any]) -> HeadWeights:
    """Read the first head, lazily. Longer drafts repeat that head."""
    family, head = family_of(config), HeadWeights()
    for file in weight_files(directory):
        # The annotations of `mx.load` allow single arrays, which files of other formats hold.
        for name, weight in cast(Weights, mx.load(str(file))).items():
            if name.endswith(CONVOLUTION):
                head.convolution = weight
            if family is None:
                head.unknown = head.unknown or UNKNOWN.search(name) is not None
            elif (part := find_part(name, family, config)) is not None:
                index, own_name = part
                if index == 0 and not own_name.startswith(SHARED):
                    head.weights[own_name] = weight
    return head


def find_part(name: str, family: HeadFamily, config: Mapping[str, Any]) -> tuple[int, str] | None:
    """The head's index and the weight's name there; None: the model's weight."""
    match = family.pattern.fullmatch(name)
    if match is None:
        return None
    layers = (config.get("text_config") or config)["num_hidden_layers"]
    index = int(match["layer"] or 0) - (layers if family.behind else 0)
    return (index, match["name"]) if index >= 0 else None


class ModelWithoutHead(nn.Module):
    """A model's parts for `load_model`; `sanitize` drops heads' weights."""

    def __init__(self, model: nn.Module, is_of_head: Callable[[str], bool]) -> None:
        super().__init__()
        for name, child in model.items():
            self[name] = child
        self._sanitize, self._is_of_head = model.sanitize, is_of_head
        self._get_model = lambda: model  # A module as an attribute would be one more child.

    def sanitize(self, weights: Weights) -> Weights:
        kept = {name: weight for name, weight in weights.items() if not self._is_of_head(name)}
        sanitized: Weights = self._sanitize(kept)
        return sanitized

    def take_model(self) -> nn.Module:
        model = self._get_model()
        for name, child in self.items():
            model[name] = child
        model.eval()
        return model


def classes_without_head(config: dict[str, Any]) -> tuple[Any, Any]:
    """For `load_model`: `ModelWithoutHead` around the model's class where the family may have
    heads."""
    kind, arguments = get_classes(config)
    family = family_of(config)
    if family is None:
        return kind, arguments

    def is_of_head(name: str) -> bool:
        return find_part(name, family, config) is not None

    return lambda args: ModelWithoutHead(kind(args), is_of_head), arguments
