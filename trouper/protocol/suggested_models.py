"""Models as suggestions, from suggested_models.toml, which names its sources."""

from __future__ import annotations

import re
import tomllib
from math import inf
from pathlib import Path
from typing import Literal

import attrs

# The context that a coding agent needs: twice the longest of `first_prompts.json`, and more.
AGENT_TOKENS = 40_960
# Growth of 4-bit weights (with scales and biases of groups of 64) in float32.
FLOAT32_FACTOR = 32 / 4.5


Purpose = Literal["chat", "agent", "vision", "embedding", "rerank", "draft"]


@attrs.frozen(kw_only=True)
class SuggestedModel:
    """A model of the hub, of about 4 bits a weight."""

    name: str
    purposes: tuple[Purpose, ...]
    licence: str
    weights_bytes: int
    token_bytes: int
    """Bytes of one token's keys and values at 16 bits."""
    context_length: int
    calls: str = ""
    """Format of tool calls."""

    def needed_bytes(self, *, float32: bool) -> int:
        """Memory for the weights and a conversation of AGENT_TOKENS."""
        if float32:
            return int(self.weights_bytes * FLOAT32_FACTOR) + 2 * self.token_bytes * AGENT_TOKENS
        return self.weights_bytes + self.token_bytes * AGENT_TOKENS


def _read() -> tuple[SuggestedModel, ...]:
    models = tomllib.loads(FILE.read_text("utf-8"))["models"]
    return tuple(
        SuggestedModel(**model | {"purposes": tuple(model["purposes"])}) for model in models
    )


FILE = Path(__file__).with_suffix(".toml")
EVERY = _read()
SUGGESTED = tuple(model for model in EVERY if "agent" in model.purposes)
"""Models that chat and call tools, from the smallest to the largest."""


def that_fit(memory_bytes: float, *, float32: bool) -> tuple[SuggestedModel, ...]:
    """Models that fit with one conversation, the largest first."""
    fitting = [model for model in SUGGESTED if model.needed_bytes(float32=float32) <= memory_bytes]
    return tuple(reversed(fitting))


MADE_FOR_MLX = "https://huggingface.co/mlx-community"
FEW = 3
FAMILY, SIZE = re.compile(r"([a-z]+)[\d.]*"), re.compile(r"(\d{1,4}(?:\.\d{1,3})?)b\b")


def alike(name: str) -> tuple[str, ...]:
    """Hub ids of suggested models of a name's family, as `qwen3` or ollama's `qwen3:8b` are
    written, the nearest in size first; else of all."""
    model, _, tag = name.lower().rpartition("/")[2].partition(":")
    family = FAMILY.match(model)
    names = [each.name for each in SUGGESTED]
    for part in (model, *((family[0], family[1]) if family else ()), ""):
        if found := [each for each in names if part in each.lower()]:
            break
    if size := _size(f"{model}-{tag}"):
        found.sort(key=lambda each: abs((_size(each.lower()) or inf) - size))
    return tuple(found[:FEW])


def _size(words: str) -> float:
    """Billions of parameters. 0: the name does not say."""
    found = SIZE.search(words)
    return float(found[1]) if found else 0.0


def no_hub_id(name: str) -> str:
    """A remedy for a name that is neither a directory nor a hub id."""
    whose = "ollama's names mean GGUF, which is not read; " if ":" in name else ""
    return f"{whose}hub ids are as {' or '.join(alike(name))}; {MADE_FOR_MLX} has more"
