"""Compiling a grammar in a process that may die of it. See `grammar_trial.py` for why and for what is sent."""

from __future__ import annotations

import json
import logging
import selectors
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from trouper.engine.grammars.trial_script import LENGTH

log = logging.getLogger("trouper.grammar")
SCRIPT = Path(__file__).with_name("trial_script.py")
START_S = 60.0
"""Time limit for starting the interpreter, llguidance and the vocabulary: well under a second on an idle machine."""
SMALL = 8192
"""Characters of a grammar that does not overflow a thread's stack however deeply it is nested."""


class TrialFailedError(Exception):
    """The grammar cannot be compiled: it took too long, or ended the process. The message says which. `slow`: it took too long, so a later
    attempt may succeed."""

    def __init__(self, message: str, *, slow: bool) -> None:
        super().__init__(message)
        self.slow = slow


class TrialProcess:
    """One process, started when it is needed and again after it has died. Any thread may ask; one grammar at a time."""

    def __init__(self, vocabulary: Callable[[], dict[str, Any]]) -> None:
        """`vocabulary`: tokens as latin-1 text, ids of the special ones, and those that end a text."""
        self._vocabulary = vocabulary
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._impossible = False

    def fault(self, text: str, max_items: int | None, timeout_s: float) -> str:
        """llguidance's error message, or "". Raises `TrialFailedError`. Also "" for a small grammar where no process can be
        started."""
        with self._lock:
            process = self._ready()
            if process is None and len(text) <= SMALL:
                return ""
            if process is None:
                reason = (
                    f"over {SMALL} characters need a process of their own to be compiled, which cannot be started here"
                )
                raise TrialFailedError(reason, slow=False)
            try:
                return str(_exchange(process, {"text": text, "max_items": max_items}, timeout_s))
            except TimeoutError:
                self._stop()
                reason = f"it takes more than {timeout_s:g} s to compile (--grammar-timeout-s)"
                raise TrialFailedError(reason, slow=True) from None
            except (OSError, EOFError):
                self._stop()
                reason = "its parts refer to one another, or repeat, too deeply to be compiled"
                raise TrialFailedError(reason, slow=False) from None

    def _ready(self) -> subprocess.Popen[bytes] | None:
        """The process, which has the vocabulary. None if none can be started. Raises `TrialFailedError` if it took too long."""
        if self._process is None and not self._impossible:
            try:
                self._process = process = _start()
                self._end = weakref.finalize(self, _ended, process)
                _exchange(process, self._vocabulary(), START_S)
            except TimeoutError:  # The machine is busy: the next grammar may find it otherwise.
                self._stop()
                reason = f"the process that compiles it did not start within {START_S:g} s"
                raise TrialFailedError(reason, slow=True) from None
            except (OSError, EOFError) as error:
                self._stop()
                self._impossible = True
                reason = str(error) or "it ended"
                log.warning("grammars are compiled without a trial: its process cannot be started (%s)", reason)
        return self._process

    def _stop(self) -> None:
        self._end()
        self._process = None


def _start() -> subprocess.Popen[bytes]:
    """Raises OSError."""
    if not sys.executable:
        raise OSError("this program has no Python of its own")
    return subprocess.Popen(  # noqa: S603 - our own script
        [sys.executable, "-P", str(SCRIPT)],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the server, which ends this one.
    )


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _exchange(process: subprocess.Popen[bytes], message: dict[str, Any], timeout_s: float) -> Any:
    """Raises OSError, EOFError, TimeoutError."""
    assert process.stdin is not None
    data = json.dumps(message).encode()
    remaining = memoryview(LENGTH.pack(len(data)) + data)
    while remaining:
        remaining = remaining[process.stdin.write(remaining) :]
    end = time.monotonic() + timeout_s
    [length] = LENGTH.unpack(_read(process, LENGTH.size, end))
    return json.loads(_read(process, length, end))


def _read(process: subprocess.Popen[bytes], length: int, end: float) -> bytes:
    assert process.stdout is not None
    data = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(data) < length:
            if not selector.select(max(end - time.monotonic(), 0)):
                raise TimeoutError
            part = process.stdout.read(length - len(data))
            if not part:
                raise EOFError
            data += part
    return data
