"""Runs trial compilations of grammars in a subprocess that may crash. See `trial_script.py` for the reasons and the protocol."""

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
    """The grammar cannot be compiled: it took too long, or ended the process, as the message explains. `slow`: it took too long,
    so a later attempt may succeed."""

    def __init__(self, message: str, *, slow: bool) -> None:
        super().__init__(message)
        self.slow = slow


class TrialProcess:
    """The trial process, started on first use and again after a crash. Any thread may use it; one grammar at a time."""

    def __init__(self, vocabulary: Callable[[], dict[str, Any]]) -> None:
        """`vocabulary`: tokens as latin-1 text, ids of special tokens, and ids of end tokens."""
        self._vocabulary = vocabulary
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._impossible = False

    def fault(self, text: str, max_items: int | None, timeout_s: float) -> str:
        """Return llguidance's error message, or "". Also returns "" for a small grammar if no process can be started. Raises
        `TrialFailedError`."""
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
        """Return the process after it has received the vocabulary. None if no process can be started. Raises `TrialFailedError` if
        the start took too long."""
        if self._process is None and not self._impossible:
            try:
                self._process = process = _start()
                self._end = weakref.finalize(self, _ended, process)
                _exchange(process, self._vocabulary(), START_S)
            except TimeoutError:  # The machine is busy: a later attempt may succeed.
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
    """Start the process. Raises OSError."""
    if not sys.executable:
        raise OSError("this program has no Python of its own")
    return subprocess.Popen(  # noqa: S603 - our own script
        [sys.executable, "-P", str(SCRIPT)],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C goes to the server, which ends this process.
    )


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _exchange(process: subprocess.Popen[bytes], message: dict[str, Any], timeout_s: float) -> Any:
    """Send a message and return the reply. Raises OSError, EOFError, TimeoutError."""
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
