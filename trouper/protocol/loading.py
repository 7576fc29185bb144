"""How far a model's loading has come, for whoever wants to see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import attrs

Unit = Literal["bytes", "steps"]


@attrs.frozen
class Loading:
    """A moment of a stage that reads many bytes, or takes many steps. What need not be read is not counted as done."""

    model: str
    stage: str
    done_bytes: int
    """Steps, in a stage of steps."""
    total_bytes: int
    unit: Unit = "bytes"


class LoadWatch(Protocol):
    """Is told how far loading has come. Called on the engine's thread, some hundred times at most a second: it must not
    block."""

    def __call__(self, loading: Loading, /) -> None: ...


def stage(watch: LoadWatch, model: str, name: str, unit: Unit = "bytes") -> Callable[[int, int], None]:
    """`watch`, for whoever only knows how much is done and how much there is in all."""
    return lambda done, total: watch(Loading(model, name, done, total, unit))


def nobody_watches(_: Loading) -> None:
    pass
