"""An engine's error is a shortage if the process has no descriptors then; its text says nothing."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import trio

from trouper import Settings
from trouper.engine import host
from trouper.engine.platform.error_text import system_shortage
from trouper.engine.step_loop import StepLoop
from trouper.protocol.problems import SystemShortage


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """As many files are open as the process may have."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_what_is_missing_is_found_by_trying() -> None:
    with no_descriptor_left():
        assert system_shortage() == os.strerror(errno.EMFILE)
    assert system_shortage() == ""


@pytest.mark.parametrize("error", [RuntimeError("popen failed"), RuntimeError("any text")])
async def test_a_step_without_descriptors_is_no_crash(
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def fail(_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(host.MlxEngine, "_engine", lambda _: SimpleNamespace(starting=None))
    monkeypatch.setattr(StepLoop, "__attrs_post_init__", lambda _: None)
    monkeypatch.setattr(StepLoop, "run", fail)
    results, _ = trio.open_memory_channel[Any](1)
    engine = host.MlxEngine(Settings())
    with pytest.raises(RuntimeError, match=str(error)):
        engine._session(SimpleQueue(), results)
    with no_descriptor_left(), pytest.raises(SystemShortage, match="Too many open files"):
        engine._session(SimpleQueue(), results)
