from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

BODIES = ("model", "backbone", "transformer")


def body_of(model: nn.Module) -> nn.Module | None:
    """Return the submodule whose result is (rows, tokens, dim) after the last norm. Evaluates
    nothing."""
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
    except Exception:  # noqa: BLE001
        # Any architecture's code: whatever it raises, it gives no hidden states.
        return False
    return (
        isinstance(hidden, mx.array)
        and hidden.shape[:2] == (1, 2)
        and hidden.ndim == 3
        and hidden.shape[-1] != logits.shape[-1]
    )
