"""The agents: their packages, and how each is started without a terminal for one task."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import attrs

from tests.agents.terminal import Dialogs

TASK = "{task}"
"""Stands for the task in a program's arguments. A program without it reads the task from stdin."""
URL = "{url}"
PICTURE = "picture.png"
"""A file of the directory where the agent works."""


@attrs.frozen
class Program:
    """An agent. `arguments` are behind `trouper connect NAME --run --`; where `connect` does not
    know it, they are its own whole command, with `variables`."""

    packages: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    piped: tuple[str, ...] | None = None
    """The arguments for a task that comes by stdin, since it is too long for a command line; None:
    it cannot."""
    with_picture: tuple[str, ...] = ()
    """The arguments for a task with `PICTURE` in its first prompt; (): it cannot."""
    is_javascript: bool = True
    without: tuple[str, ...] = ()
    """Packages that it names and can do without, which are not installed; of Python only."""
    python: str = sys.executable
    """For the others: the interpreter, or a version of it that uv finds"""
    connected: bool = True
    variables: Mapping[str, str] = attrs.field(factory=dict)
    dialogs: Dialogs | None = None
    """In a terminal; None: it is not played there"""

    @property
    def package(self) -> str:
        """The name of the first package, without a version."""
        first = self.packages[0]
        return first[0] + first[1:].partition("@")[0].partition("=")[0]


NODE = Program(("node",))

AGENTS: Mapping[str, Program] = {
    "claude": Program(
        ("@anthropic-ai/claude-code",),
        ("-p", TASK, "--dangerously-skip-permissions"),
        piped=("-p", "--dangerously-skip-permissions"),
        with_picture=("-p", f"@{PICTURE} {TASK}", "--dangerously-skip-permissions"),
        variables={"IS_SANDBOX": "1"},
        dialogs=Dialogs(
            "for shortcuts",
            {
                "Choose the text style": "Enter",
                "Press Enter to continue": "Enter",
                "Yes, I trust this folder": "Down Enter",
                "Do you want to": "Enter",
            },
        ),
    ),
    "codex": Program(
        ("@openai/codex",),
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
        piped=("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-"),
        with_picture=(
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            TASK,
            "--image",
            PICTURE,
        ),
        dialogs=Dialogs(
            "Ask Codex to do anything", {"Yes, continue": "Enter", "Yes, proceed": "y"}
        ),
    ),
    "opencode": Program(
        ("opencode-ai",),
        ("run", TASK),
        piped=("run",),
        with_picture=("run", TASK, "--file", PICTURE),
        dialogs=Dialogs("Ask anything"),
    ),
    "qwen": Program(
        ("@qwen-code/qwen-code",),
        ("--yolo", "-p", TASK),
        piped=("--yolo",),
        with_picture=("--yolo", "-p", f"@{PICTURE} {TASK}"),
    ),
    "cline": Program(("cline",), ("--yolo", TASK)),
    "pi": Program(
        ("@earendil-works/pi-coding-agent",),
        ("-p", TASK),
        piped=("-p",),
        with_picture=("-p", f"@{PICTURE}", TASK),
    ),
    # Of stdin it reads no more than a pipe holds.
    "continue": Program(("@continuedev/cli",), ("--auto", "-p", TASK)),
    "aider": Program(
        ("aider-chat",),
        (
            "--yes-always",
            "--no-git",
            "--no-check-update",
            "--analytics-disable",
            "--no-show-model-warnings",
            "--auto-test",
            "--test-cmd",
            "python3 check.py",
            "--message",
            TASK,
            "greeting.py",
        ),
        with_picture=(
            "--yes-always",
            "--no-git",
            "--no-check-update",
            "--analytics-disable",
            "--no-show-model-warnings",
            "--message",
            TASK,
            PICTURE,
        ),
        is_javascript=False,
    ),
    "copilot": Program(
        ("@github/copilot",),
        ("-p", TASK, "--allow-all-tools"),
        with_picture=("-p", TASK, "--allow-all-tools", "--attachment", PICTURE),
    ),
    "openclaw": Program(("openclaw",), ("agent", "--local", "--agent", "main", "--message", TASK)),
    "openhands": Program(
        ("openhands",),
        ("--headless", "-t", TASK),
        is_javascript=False,
        python="3.12",
        variables={"OPENHANDS_SUPPRESS_BANNER": "1"},
    ),
    "vibe": Program(
        ("mistral-vibe",),
        ("-p", TASK, "--agent", "auto-approve", "--output", "text"),
        with_picture=("-p", f"@{PICTURE} {TASK}", "--agent", "auto-approve", "--output", "text"),
        is_javascript=False,
        python="3.12",
    ),
    "nanocoder": Program(
        ("@nanocollective/nanocoder",),
        ("--trust-directory", "--mode", "yolo", "run", TASK),
    ),
    # 7.8.1 was published without its programs for Linux.
    "kilo": Program(
        ("@kilocode/cli@7.7.7",),
        ("run", "--auto", TASK),
        with_picture=("run", "--auto", TASK, "--file", PICTURE),
    ),
    "mini-swe-agent": Program(
        ("mini-swe-agent", "mcp"),
        (
            "mini",
            "--model",
            "openai/scripted",
            "--yolo",
            "--exit-immediately",
            "--cost-limit",
            "0",
            "--task",
            TASK,
            "--output",
            "trajectory.json",
        ),
        is_javascript=False,
        connected=False,
        variables={
            "OPENAI_API_BASE": f"{URL}/v1",
            "OPENAI_API_KEY": "none",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_CONFIGURED": "true",
        },
    ),
}
"""By the names of `trouper connect`, where it knows them."""
