"""The one place that knows Trio's private names for seeded scheduling: same seed, same
interleaving."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import trio
from trio.testing import MockClock

T = TypeVar("T")


@contextmanager
def _seeded_scheduling(seed: int) -> Iterator[None]:
    scheduler: Any = trio._core._run
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    state = scheduler._r.getstate()
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    scheduler._r.seed(seed)
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before
        scheduler._r.setstate(state)


def run_seeded(seed: int, main: Callable[..., Awaitable[T]], *args: Any) -> T:
    """`trio.run` on a virtual clock that jumps when everybody waits, tasks scheduled in an order
    drawn from `seed`."""
    with _seeded_scheduling(seed):
        return trio.run(main, *args, clock=MockClock(autojump_threshold=0))
