"""The state of a managed model, and which model is unloaded when another one needs its memory: the least recently used idle one."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import attrs
import trio

from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.served_models import State
from trouper.protocol.problems import Problem
from trouper.protocol.settings import Settings


@attrs.define(eq=False)
class ManagedModel:
    """State of one model in the model manager."""

    settings: Settings
    names: tuple[str, ...]
    state: State = "unloaded"
    runtime: Runtime | None = None
    weights_bytes: int = 0
    leases: int = 0
    """Number of leases, including those of waiting requests."""
    waiting: int = 0
    """Number of requests that wait for the model."""
    used_at: float = 0.0
    """Time when the model was loaded, or when a lease on it was last released."""
    problem: Problem | None = None
    """Problem of the last attempt to load the model."""
    unusable_until: float = -inf
    """Time until which the model is not loaded again."""
    ended: trio.Event = attrs.field(factory=trio.Event)
    """Set when the model's graph has ended."""


def loaded(models: Sequence[ManagedModel]) -> list[ManagedModel]:
    return [model for model in models if model.state == "ready"]


def has_room(models: Sequence[ManagedModel], new: ManagedModel, budget_bytes: int) -> bool:
    """Whether a model fits beside the loaded ones. A single model may be of any size; loading fails if the machine has no room."""
    others = loaded(models)
    return not others or sum(other.weights_bytes for other in others) + new.weights_bytes <= budget_bytes


def next_to_unload(models: Sequence[ManagedModel]) -> ManagedModel | None:
    """The loaded model without a lease that was used least recently; None if all are in use."""
    idle = [model for model in loaded(models) if not model.leases]
    return min(idle, key=lambda model: model.used_at) if idle else None
