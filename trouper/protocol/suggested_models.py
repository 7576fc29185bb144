"""Small models that chat and call tools, as suggestions. Sources: docs/models.md."""

from __future__ import annotations

import attrs

# Context for a coding agent: twice the longest of `trouper/cli/agents/first_prompts.json`.
AGENT_TOKENS = 40_960
# Growth of 4-bit weights (with scales and biases of groups of 64) in float32.
FLOAT32_FACTOR = 32 / 4.5


@attrs.frozen(kw_only=True)
class SuggestedModel:
    """A model of the hub, quantized to 4 bits."""

    name: str
    weights_bytes: int
    token_bytes: int
    """Bytes of one token's keys and values at 16 bits."""
    context_length: int
    calls: str
    """Format of tool calls."""

    def needed_bytes(self, *, float32: bool) -> int:
        """Memory for the weights and a conversation of AGENT_TOKENS."""
        if float32:
            return int(self.weights_bytes * FLOAT32_FACTOR) + 2 * self.token_bytes * AGENT_TOKENS
        return self.weights_bytes + self.token_bytes * AGENT_TOKENS


JSON_CALLS, XML_CALLS = "Hermes JSON", "Qwen XML"
# From the smallest to the largest.
SUGGESTED = (
    SuggestedModel(
        name="mlx-community/Qwen3-1.7B-4bit",
        weights_bytes=968_001_536,
        token_bytes=114_688,
        context_length=40_960,
        calls=JSON_CALLS,
    ),
    SuggestedModel(
        name="mlx-community/Qwen3-4B-Instruct-2507-4bit",
        weights_bytes=2_262_920_192,
        token_bytes=147_456,
        context_length=262_144,
        calls=JSON_CALLS,
    ),
    SuggestedModel(
        name="mlx-community/Qwen3-8B-4bit",
        weights_bytes=4_607_731_712,
        token_bytes=147_456,
        context_length=40_960,
        calls=JSON_CALLS,
    ),
    SuggestedModel(
        name="mlx-community/Qwen3-14B-4bit",
        weights_bytes=8_307_783_680,
        token_bytes=163_840,
        context_length=40_960,
        calls=JSON_CALLS,
    ),
    SuggestedModel(
        name="mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit",
        weights_bytes=17_174_622_208,
        token_bytes=98_304,
        context_length=262_144,
        calls=XML_CALLS,
    ),
)


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
