"""The table of models: their states, and what is done next so that one can be loaded. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Generic, Literal, TypeVar

import attrs

from trouper.protocol.problems import Problem

State = Literal["unloaded", "asleep", "waiting", "loading", "ready", "unloading"]
Away = Literal["unloaded", "asleep"]
AWAY: tuple[Away, ...] = ("unloaded", "asleep")
TRANSITIONS: Mapping[State, frozenset[State]] = {
    "unloaded": frozenset({"waiting", "loading"}),
    "asleep": frozenset({"waiting", "unloaded"}),
    "waiting": frozenset({"loading", "unloaded"}),
    "loading": frozenset({"ready", "unloaded"}),
    "ready": frozenset({"unloading", "unloaded"}),
    "unloading": frozenset({"unloaded", "asleep"}),
}
"""The states that may follow each. A model waits for room and for its turn before it is loading;
one that crashes is unloaded."""


@attrs.define(eq=False)
class ModelRow:
    names: tuple[str, ...]
    state: State = "unloaded"
    weights_bytes: int = 0
    leases: int = 0
    waiting: int = 0
    """Leases that wait until the model is loaded."""
    used_at: float = 0.0
    """Time of loading, or of the last release of a lease."""
    problem: Problem | None = None
    unusable_until: float = -inf
    pinned: bool = False
    ttl_s: float = 0.0
    """Time without requests until sleep; 0: never."""
    away_as: Away = "unloaded"
    is_silent: bool = False
    """Whether loading is silent for so long that others load beside it."""

    def enter(self, state: State) -> None:
        """The only door to another state."""
        assert state == self.state or state in TRANSITIONS[self.state], (
            f"{self.names[0]} cannot be {state} after {self.state}"
        )
        self.state = state

    def leave(self) -> None:
        """The graph has ended: be away as was ordered, and unloaded after a crash."""
        self.enter(self.away_as)
        self.away_as = "unloaded"

    @property
    def running(self) -> int:
        return self.leases - self.waiting

    @property
    def has_weights(self) -> bool:
        return self.state in ("ready", "unloading") or self.is_silent

    @property
    def is_idle(self) -> bool:
        return self.state == "ready" and not self.leases and not self.pinned

    @property
    def is_kept(self) -> bool:
        return self.state == "ready" and self.pinned

    @property
    def sleeps_at(self) -> float:
        """When an idle model's time to live ends."""
        return self.used_at + self.ttl_s if self.is_idle and self.ttl_s else inf


T = TypeVar("T", bound=ModelRow)


@attrs.frozen
class LoadLimits:
    weights_bytes: int
    max_models: int | None = None


@attrs.frozen
class Unload(Generic[T]):
    model: T


@attrs.frozen
class Refuse:
    """No waiting will help."""

    reason: str


Next = Literal["load", "wait"] | Unload[T] | Refuse


def next_for(models: Sequence[T], new: T, limits: LoadLimits) -> Next[T]:
    """Decide what comes next so that `new` can be loaded. Idle models are unloaded, least recently
    used first, unless that would not suffice."""
    others = [model for model in models if model is not new]
    if has_room(loaded(others), new, limits):
        return "load"
    if reason := lacking_after_pinned(models, new, limits):
        return Refuse(reason)
    idle = next_to_unload(others)
    return "wait" if idle is None or lacking_room(models, new, limits) else Unload(idle)


def has_room(others: Sequence[ModelRow], new: ModelRow, limits: LoadLimits) -> bool:
    """Whether a model fits beside others. A single model may have any size; loading fails if the
    machine has no room."""
    if limits.max_models is not None and len(others) >= limits.max_models:
        return False
    return (
        not others
        or sum(other.weights_bytes for other in others) + new.weights_bytes <= limits.weights_bytes
    )


def loaded(models: Sequence[T]) -> list[T]:
    """Models with weights in memory, even while unloading or loading in silence."""
    return [model for model in models if model.has_weights]


def lacking_room(models: Sequence[ModelRow], new: ModelRow, limits: LoadLimits) -> str:
    """Reason why a model would not fit without all idle ones; "" if it would."""
    return _lack(
        [model for model in loaded(models) if model is not new and not model.is_idle], new, limits
    )


def lacking_after_pinned(models: Sequence[ModelRow], new: ModelRow, limits: LoadLimits) -> str:
    """Reason why a model would not fit beside the pinned ones; "" if it would."""
    # No other model is named: clients read the reason, and their keys may hide models.
    held = [model for model in loaded(models) if model is not new and model.is_kept]
    return _lack(held, new, limits, holders="pinned models")


def _lack(held: Sequence[ModelRow], new: ModelRow, limits: LoadLimits, holders: str = "") -> str:
    if has_room(held, new, limits):
        return ""
    used = sum(model.weights_bytes for model in held)
    holders = holders or ", ".join(
        f"{model.names[0]} ({'pinned' if model.pinned else 'in use'})" for model in held
    )
    if limits.max_models is not None and len(held) >= limits.max_models:
        return (
            f"{new.names[0]} would be one more than {limits.max_models} loaded models "
            f"(--max-loaded-models): {holders}"
        )
    free = max(0, limits.weights_bytes - used)
    return (
        f"{new.names[0]} needs {new.weights_bytes / 1e9:.2f} GB for its weights, and "
        f"{free / 1e9:.2f} of "
        f"{limits.weights_bytes / 1e9:.2f} GB (--model-memory) are left beside {holders}, which "
        "would have to be unloaded"
    )


def next_to_unload(models: Sequence[T]) -> T | None:
    """The least recently used idle model; None if all are pinned or in use."""
    idle = [model for model in models if model.is_idle]
    return min(idle, key=lambda model: model.used_at) if idle else None


def fits_now(models: Sequence[ModelRow], model: ModelRow, limits: LoadLimits) -> bool | None:
    """Whether a model could be loaded without disturbing others; None: unknown size."""
    return None if not model.weights_bytes else not lacking_room(models, model, limits)
