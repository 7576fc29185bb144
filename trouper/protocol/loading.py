"""How far a model's loading has come, for whoever wants to see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs


@attrs.frozen
class Loading:
    """A moment of a stage that reads many bytes. What need not be read is not counted as done."""

    model: str
    stage: str
    done_bytes: int
    total_bytes: int


class LoadWatch(Protocol):
    """Is told how far loading has come. Called on the engine's thread, some hundred times at most a second: it must not
    block."""

    def __call__(self, loading: Loading, /) -> None: ...


def stage(watch: LoadWatch, model: str, name: str) -> Callable[[int, int], None]:
    """`watch`, for whoever only knows bytes done and bytes in all."""
    return lambda done, total: watch(Loading(model, name, done, total))


def nobody_watches(_: Loading) -> None:
    pass
