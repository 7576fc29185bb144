"""Compiles grammars in subprocesses that may crash (`trial_script.py`)."""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from threading import Semaphore
from typing import IO, Any

from trouper.engine.grammars.trial_script import LENGTH
from trouper.protocol.problems import is_shortage
from trouper.system.waking_time import LOOK_S, WakingTime

log = logging.getLogger("trouper.grammar")
SCRIPT = Path(__file__).with_name("trial_script.py")
START_S = 60.0
AGAIN_S = 30.0
SLOW_KEPT_S = 600.0
"""Time for which a slow grammar is refused."""
SMALL = 8192  # Characters of a grammar that overflows no stack.
AT_ONCE = 4  # Maximum number of processes: as many as threads of `worker_threads.py`.
KEPT = 2


class TrialFailedError(Exception):
    """The grammar cannot be compiled, for `kept_s` seconds at least."""

    def __init__(self, message: str, *, kept_s: float = inf) -> None:
        super().__init__(message)
        self.kept_s = kept_s


class TrialUnavailableError(Exception):
    """There is no process for the moment."""


class TrialPool:
    """The processes that try grammars. Thread-safe."""

    def __init__(self, vocabulary: Callable[[], dict[str, Any]]) -> None:
        """`vocabulary`: tokens as latin-1 text, ids of special and of end tokens."""
        self._vocabulary = vocabulary
        self._idle: list[TrialProcess] = []
        self._room = Semaphore(AT_ONCE)
        self._refused_until = 0.0
        """Time until which no process is started after a failure."""
        self._warned = False

    def fault(self, text: str, max_items: int | None, timeout_s: float) -> str:
        """Return llguidance's error message, or "", also for a small grammar without a process.
        Raises `TrialFailedError`, `TrialUnavailableError`."""
        with self._process() as process:
            if process is not None:
                return process.fault(text, max_items, timeout_s)
        if len(text) <= SMALL:
            return ""
        reason = (
            f"over {SMALL} characters need a process of their own to be compiled, which cannot be "
            "started here"
        )
        raise TrialFailedError(reason, kept_s=0)

    @contextmanager
    def _process(self) -> Iterator[TrialProcess | None]:
        """Lend a process that has received the vocabulary; None: none starts. Raises
        `TrialUnavailableError`."""
        with self._room:
            process = self._take_idle() or self._start_another()
            try:
                yield process
            finally:
                if process is not None:
                    self._give_back(process)

    def _take_idle(self) -> TrialProcess | None:
        with suppress(IndexError):
            while True:
                if (process := self._idle.pop()).is_alive:
                    return process
        return None

    def _give_back(self, process: TrialProcess) -> None:
        if process.is_alive and len(self._idle) < KEPT:
            self._idle.append(process)
        else:
            process.stop()

    def _start_another(self) -> TrialProcess | None:
        if time.monotonic() < self._refused_until:
            return None
        try:
            process = TrialProcess(self._vocabulary())
        except TimeoutError:
            reason = f"the process that compiles it did not start within {START_S:g} s"
            raise TrialUnavailableError(reason) from None
        except (OSError, EOFError, MemoryError) as error:
            if is_shortage(error):
                reason = f"the process that compiles it cannot be started for the moment ({error})"
                raise TrialUnavailableError(reason) from None
            self._refused_until = time.monotonic() + AGAIN_S
            if not self._warned:
                reason = str(error) or "it ended"
                log.warning(
                    "grammars are compiled without a trial: its process cannot be started (%s)",
                    reason,
                )
            self._warned = True
            return None
        self._warned = False
        return process


class TrialProcess:
    def __init__(self, vocabulary: dict[str, Any]) -> None:
        """Start the process. Raises OSError, EOFError, TimeoutError, MemoryError,
        `TrialUnavailableError`."""
        self._process = _start()
        self.stop: Callable[[], object] = weakref.finalize(self, _end, self._process)
        self._exchange(vocabulary, START_S)

    def _exchange(self, message: dict[str, Any], timeout_s: float) -> Any:
        """Send a message and return the reply. Raises OSError, EOFError, TimeoutError, MemoryError,
        `TrialUnavailableError`."""
        # Without a reply the process ends: a late one would answer the next message.
        try:
            return _exchange(self._process, message, timeout_s)
        except (OSError, EOFError) as error:
            self.stop()
            if not isinstance(error, TimeoutError) and self._process.returncode == -signal.SIGKILL:
                raise TrialUnavailableError(
                    "the process that compiles it was ended from outside"
                ) from None
            raise
        except BaseException:
            self.stop()
            raise

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fault(self, text: str, max_items: int | None, timeout_s: float) -> str:
        """Return and raise as `TrialPool.fault`."""
        try:
            return str(self._exchange({"text": text, "max_items": max_items}, timeout_s))
        except TimeoutError:
            reason = f"it takes more than {timeout_s:g} s to compile (--grammar-timeout-s)"
            raise TrialFailedError(reason, kept_s=SLOW_KEPT_S) from None
        except (OSError, EOFError):
            reason = "its parts refer to one another, or repeat, too deeply to be compiled"
            raise TrialFailedError(reason) from None


def _start() -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise OSError("this program has no Python of its own")
    process = subprocess.Popen(  # noqa: S603 - our own script
        [sys.executable, "-P", str(SCRIPT)],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C goes to the server, which ends this process.
    )
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)  # One that is stopped reads nothing.
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _exchange(process: subprocess.Popen[bytes], message: dict[str, Any], timeout_s: float) -> Any:
    data = json.dumps(message).encode()
    clock = WakingTime()
    end = clock.now() + timeout_s
    _write(process, LENGTH.pack(len(data)) + data, clock, end)
    [length] = LENGTH.unpack(_read(process, LENGTH.size, clock, end))
    return json.loads(_read(process, length, clock, end))


def _write(process: subprocess.Popen[bytes], data: bytes, clock: WakingTime, end: float) -> None:
    assert process.stdin is not None
    remaining = memoryview(data)
    while remaining:
        # A full pipe takes nothing: None.
        remaining = remaining[process.stdin.write(remaining) or 0 :]
        if remaining:
            _wait(process.stdin, selectors.EVENT_WRITE, clock, end)


def _read(process: subprocess.Popen[bytes], length: int, clock: WakingTime, end: float) -> bytes:
    assert process.stdout is not None
    data = b""
    while len(data) < length:
        _wait(process.stdout, selectors.EVENT_READ, clock, end)
        part = process.stdout.read(length - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _wait(pipe: IO[bytes], event: int, clock: WakingTime, end: float) -> None:
    with selectors.PollSelector() as selector:  # Needs no further descriptor.
        selector.register(pipe, event)
        while not selector.select(min(max(end - clock.now(), 0), LOOK_S)):
            if clock.now() >= end:
                raise TimeoutError
