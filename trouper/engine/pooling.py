"""Embeddings: the pooled hidden states of a prompt's tokens, for models whose body can be run without their head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from trouper.protocol.model import EmbeddingLayout
from trouper.protocol.plans import Pooling

POOLING_FILE = Path("1_Pooling") / "config.json"
"""File in which sentence-transformers stores how a model pools."""
POOLINGS: dict[str, Pooling] = {
    "mean": "mean", "mean_sqrt_len_tokens": "mean", "lasttoken": "last", "cls": "first", "max": "max", "weightedmean": "weighted",
}  # fmt: skip
"""By the names that sentence-transformers has. Vectors get length one, so that it is no matter by what a mean was divided."""
SWITCHES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""As older files name them, each as true or false."""
BODIES = ("model", "backbone", "transformer")
"""Names of the attribute that holds all of an mlx-lm model except its head."""


def body_of(model: nn.Module) -> nn.Module | None:
    """Find the submodule that returns hidden states, (rows, tokens, dim), after its last norm. Evaluates nothing."""
    for owner in (model, getattr(model, "language_model", None)):
        for name in BODIES:
            body = getattr(owner, name, None)
            if isinstance(body, nn.Module) and _gives_hidden(body, model):
                return body
    return None


def _gives_hidden(body: nn.Module, model: nn.Module) -> bool:
    try:
        cache = make_prompt_cache(model)
        hidden = body(mx.array([[0, 1]]), cache=cache)
        logits = model(mx.array([[0, 1]]), cache=make_prompt_cache(model))
    except Exception:  # noqa: BLE001 - any architecture's code: whatever it raises, it gives no hidden states
        return False
    return (
        isinstance(hidden, mx.array)
        and hidden.shape[:2] == (1, 2)
        and hidden.ndim == 3
        and hidden.shape[-1] != logits.shape[-1]
    )


def embedding_of(model: nn.Module, directory: Path) -> EmbeddingLayout | None:
    """Describe the model's embeddings. None: the model gives none, or pools them in a way that is not known."""
    body, pooling = body_of(model), pooling_of(directory)
    if body is None or pooling is None:
        return None
    hidden = body(mx.array([[0]]), cache=make_prompt_cache(model))
    return EmbeddingLayout(int(hidden.shape[-1]), pooling)


def pooling_of(directory: Path) -> Pooling | None:
    """Read the kind of pooling from the model's files; the default is the mean. None: several that are joined, or one that is not known."""
    try:
        config: Any = json.loads((directory / POOLING_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return "mean"
    names = _names_of(config) if isinstance(config, dict) else []
    return POOLINGS.get(names[0]) if len(names) == 1 else None if names else "mean"


def _names_of(config: dict[str, Any]) -> list[str]:
    """Names of the kinds of pooling: one or a list of them since 2026, before that a switch for each."""
    named = config.get("pooling_mode")
    if isinstance(named, str | list):
        return [named] if isinstance(named, str) else [str(name) for name in named]
    return [name for switch, name in SWITCHES.items() if config.get(switch)]


@attrs.define(eq=False)
class Pool:
    """Pooling of one prompt's hidden states, chunk by chunk."""

    pooling: Pooling
    kept: mx.array | None = None
    tokens: int = 0
    """Number of tokens so far."""

    def add(self, hidden: mx.array) -> None:
        """Add the hidden states of the prompt's next tokens, (tokens, dim)."""
        states = hidden.astype(mx.float32)
        first, self.tokens = self.tokens, self.tokens + states.shape[0]
        match self.pooling:
            case "mean":
                self.kept = states.sum(0) if self.kept is None else self.kept + states.sum(0)
            case "last":
                self.kept = states[-1]
            case "first":
                self.kept = states[0] if self.kept is None else self.kept
            case "max":
                self.kept = states.max(0) if self.kept is None else mx.maximum(self.kept, states.max(0))
            case "weighted":
                weighted = (states * mx.arange(first + 1, self.tokens + 1)[:, None]).sum(0)
                self.kept = weighted if self.kept is None else self.kept + weighted

    def vector(self) -> mx.array:
        """Return the vector, (dim,) float32 of length one."""
        assert self.kept is not None
        return self.kept / mx.maximum(mx.linalg.norm(self.kept), 1e-12)
