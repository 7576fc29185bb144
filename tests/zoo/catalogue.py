"""All configs of the zoo by name, and the modules that have none with the reason."""

from __future__ import annotations

from pathlib import Path

import mlx_lm.models

from tests.zoo.dense import DENSE
from tests.zoo.experts import EXPERT_MODELS
from tests.zoo.nested import NESTED
from tests.zoo.pieces import Config
from tests.zoo.recurrent import RECURRENT
from tests.zoo.ropes import ROPES
from tests.zoo.windows import WINDOWS

CONFIGS: dict[str, Config] = {**DENSE, **WINDOWS, **EXPERT_MODELS, **RECURRENT, **NESTED, **ROPES}

LEFT_OUT = {
    "bitnet": "its layers are a kernel for Metal",
    "muse_spark": "its rotary embedding is a kernel for Metal",
    "olmo": "ends the process where the package ai2-olmo is not installed",
    "prism_hadamard_qwen35": "loads only weights packed in 2 bits with a manifest of its own",
}
"""Modules that mlx-lm's own loop cannot run on a CPU, and why."""

BY_PIECES = {
    "phi3small": (
        "adds its mask to the scores as ones and zeros, so a piece's tokens see those after them"
    ),
    **{
        name: "its base follows the end of the piece, beyond the limit"
        for name in CONFIGS
        if "dynamic rope" in name
    },
}
"""Configs whose answer depends, in mlx-lm's own loop, on the pieces in which a prompt comes, and
why."""


COARSE = {"afm7": 0.01}
"""Bounds of configs that round to 8 bits while they compute, where float32's last bit may choose
the neighbouring code: 0.003 was seen on one CPU and 2e-4 on another."""


def modules() -> list[str]:
    """Names of mlx-lm's modules that have a model. By their text: olmo's cannot be imported."""
    found = (Path(path).glob("*.py") for path in mlx_lm.models.__path__)
    texts = {file.stem: file.read_text(encoding="utf-8") for files in found for file in files}
    return sorted(name for name, text in texts.items() if "class ModelArgs" in text)


def module_of(config: Config) -> str:
    """The module that builds a config's model."""
    return str(config["model_type"])
