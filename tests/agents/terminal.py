"""An agent in a terminal, as people use it: the task is typed, and its questions are answered.

The screen is tmux's, which must be installed.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

WIDTH, HEIGHT = 110, 45
LOOK_S = 0.3


@attrs.frozen
class Dialogs:
    """Texts of the screen, and the keys, in tmux's words, that answer them."""

    ready: str
    """Shown where a task can be typed"""
    answers: Mapping[str, str] = attrs.field(factory=dict)
    """Of the first start, and for each permission"""


@attrs.frozen
class Terminal:
    socket: Path

    def start(self, line: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        size = ("-x", str(WIDTH), "-y", str(HEIGHT))
        command = ("-f", "/dev/null", "new-session", "-d", *size, "-c", str(cwd), *line)
        self._tmux(*command, environment={**environment, "TERM": "xterm-256color"})
        self._tmux("set-option", "remain-on-exit", "on")

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p", "-J")

    def press(self, keys: str) -> None:
        self._tmux("send-keys", *keys.split())

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)

    def close(self) -> None:
        self._tmux("kill-server")

    def _tmux(self, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
        line = ["tmux", "-S", str(self.socket), *arguments]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
        return done.stdout


def converse(terminal: Terminal, dialogs: Dialogs, task: str, final: str, limit_s: float) -> bool:
    """Type the task when the agent is ready, and answer each dialog. Return whether `final` came
    within the limit."""
    is_given, answered = False, ""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        screen = terminal.screen()
        if final in screen:
            return True
        keys = next((keys for text, keys in dialogs.answers.items() if text in screen), "")
        if keys and screen != answered:
            terminal.press(keys)
            answered = screen
        elif not keys and dialogs.ready in screen and not is_given:
            terminal.type(task)
            time.sleep(LOOK_S)  # Keys that come at once are a paste, whose end is no Enter.
            terminal.press("Enter")
            is_given = True
        time.sleep(LOOK_S)
    return False
