"""Models as suggestions, from suggested_models.toml, which names its sources."""

from __future__ import annotations

import tomllib
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


def alike(name: str) -> tuple[str, ...]:
    """Hub ids of suggested models whose names contain `name`, as `qwen3` or ollama's `qwen3:4b` are
    written; else those of the smallest models."""
    words = name.lower().replace(":", "-").rsplit("/", maxsplit=1)[-1]
    names = [model.name for model in SUGGESTED]
    return tuple([each for each in names if words and words in each.lower()] or names)[:FEW]


def no_hub_id(name: str) -> str:
    """A remedy for a name that is neither a directory nor a hub id."""
    return f"hub ids are as {' or '.join(alike(name))}; {MADE_FOR_MLX} has more"
