"""The task, and the model's side of it: look at a file, change it with the agent's own tool, run
it, say what came out.

What is written has quotes, tags, a line break and letters beyond ASCII, which each format carries
in its own way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.scripted.conversation import Conversation

Json = dict[str, Any]
BEFORE = 'print("Hello")'
AFTER = 'print("Goodbye")  # <b>"ü" & \\n</b>\nprint(1 < 2)'
COMPLAINT = "greeting.py does not say it"
CHECK = f"""\
import subprocess, sys
said = subprocess.run([sys.executable, "greeting.py"], capture_output=True, text=True).stdout
sys.exit(None if "Goodbye" in said else {COMPLAINT!r})
"""
RUN = "python3 greeting.py"
TASK = "Make greeting.py say Goodbye instead of Hello, then run it."
FINAL = "It says goodbye now"
SUBTASK = "Say the word tangerine."
"""What an agent's own agent is asked."""
HELPED = "Tangerine."
DIRECTORY = "TROUPER_AGENT_DIRECTORY"
"""Environment variable of the scripted server: where the agent works."""

Step = tuple[str, Json]
"""A tool's name, as the agent offers it, and arguments."""


def script(conversation: Conversation) -> str:
    if SUBTASK in conversation.question:
        return conversation.answer(HELPED)
    offered = {str(tool["function"]["name"]) for tool in conversation.tools}
    if not offered:
        return _without_tools(conversation)
    steps = steps_of(offered)
    done = len(conversation.results)
    if done < len(steps):
        name, arguments = steps[done]
        tool = next(offer for offer in sorted(offered, key=len) if offer.endswith(name))
        if name == "wait_agent":
            arguments = arguments | {"targets": [json.loads(conversation.results[-1])["agent_id"]]}
        return conversation.calls(
            (tool, arguments), text=f"Step {done + 1}.", reasoning=f"Of {len(steps)} steps."
        )
    return conversation.answer(f"{FINAL}: {conversation.results[-1]}", reasoning="That was it.")


def steps_of(offered: set[str]) -> Sequence[Step]:
    """Return the steps of the agent that offers these tools."""
    path = os.path.join(os.environ[DIRECTORY], "greeting.py")  # noqa: PTH118 - one text
    return next(steps(path) for tool, steps in STEPS.items() if tool in offered)


def _claude(path: str) -> Sequence[Step]:
    return (
        ("ToolSearch", {"query": "select:WebFetch", "max_results": 3}),
        ("Agent", {"description": "A word", "prompt": SUBTASK, "subagent_type": "general-purpose"}),
        ("Read", {"file_path": path}),
        ("Edit", {"file_path": path, "old_string": BEFORE, "new_string": AFTER}),
        ("Bash", {"command": RUN, "description": "Run it"}),
    )


def _codex(_path: str) -> Sequence[Step]:
    """Its own agent is of a namespace. A here-document changes the file: to unknown models it
    offers no apply_patch."""
    return (
        ("spawn_agent", {"message": SUBTASK}),
        ("wait_agent", {"timeout_ms": 20_000}),
        ("exec_command", {"cmd": "cat greeting.py"}),
        ("exec_command", {"cmd": f"cat > greeting.py <<'END'\n{AFTER}\nEND"}),
        ("exec_command", {"cmd": RUN}),
    )


def _opencode(path: str) -> Sequence[Step]:
    return (
        ("read", {"filePath": path}),
        ("edit", {"filePath": path, "oldString": BEFORE, "newString": AFTER}),
        ("bash", {"command": RUN, "description": "Run it"}),
    )


def _qwen(path: str) -> Sequence[Step]:
    return (
        ("read_file", {"file_path": path}),
        ("edit", {"file_path": path, "old_string": BEFORE, "new_string": AFTER}),
        ("run_shell_command", {"command": RUN, "is_background": False}),
    )


def _cline(path: str) -> Sequence[Step]:
    return (
        ("read_files", {"files": [{"path": path}]}),
        ("editor", {"path": path, "old_text": BEFORE, "new_text": AFTER}),
        ("run_commands", {"commands": [RUN]}),
        ("submit_and_exit", {"summary": f"{FINAL}: it was run", "verified": True}),
    )


def _pi(path: str) -> Sequence[Step]:
    return (
        ("read", {"path": path}),
        ("edit", {"path": path, "edits": [{"oldText": BEFORE, "newText": AFTER}]}),
        ("bash", {"command": RUN}),
    )


def _continue(path: str) -> Sequence[Step]:
    return (
        ("Read", {"filepath": path}),
        ("Edit", {"file_path": path, "old_string": BEFORE, "new_string": AFTER}),
        ("Bash", {"command": RUN}),
    )


def _continue_several(path: str) -> Sequence[Step]:
    """To models whose names it knows as good ones it offers MultiEdit in place of Edit."""
    read, _edit, run = _continue(path)
    return (
        read,
        ("MultiEdit", {"file_path": path, "edits": [{"old_string": BEFORE, "new_string": AFTER}]}),
        run,
    )


def _copilot(path: str) -> Sequence[Step]:
    return (
        ("view", {"path": path}),
        ("edit", {"path": path, "old_str": BEFORE, "new_str": AFTER}),
        ("bash", {"command": RUN, "description": "Run it"}),
    )


def _openclaw(path: str) -> Sequence[Step]:
    read, edit, (_tool, arguments) = _pi(path)
    return (read, edit, ("exec", arguments | {"workdir": str(Path(path).parent)}))


def _openhands(path: str) -> Sequence[Step]:
    file = {"path": path, "security_risk": "LOW", "summary": "The file"}
    return (
        ("file_editor", file | {"command": "view"}),
        ("file_editor", file | {"command": "str_replace", "old_str": BEFORE, "new_str": AFTER}),
        ("terminal", {"command": RUN, "security_risk": "LOW", "summary": "Run it"}),
    )


def _vibe(path: str) -> Sequence[Step]:
    return (
        ("read_file", {"path": path}),
        ("edit", {"file_path": path, "old_string": BEFORE, "new_string": AFTER}),
        ("bash", {"command": RUN}),
    )


def _nanocoder(path: str) -> Sequence[Step]:
    return (
        ("read_file", {"path": path}),
        ("string_replace", {"path": path, "old_str": BEFORE, "new_str": AFTER}),
        ("execute_bash", {"command": RUN}),
    )


def _mini_swe_agent(_path: str) -> Sequence[Step]:
    return (
        ("bash", {"command": "cat greeting.py"}),
        ("bash", {"command": f"cat > greeting.py <<'END'\n{AFTER}\nEND"}),
        ("bash", {"command": RUN}),
        ("bash", {"command": f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {FINAL}"}),
    )


STEPS: Mapping[str, Callable[[str], Sequence[Step]]] = {
    "fetch_copilot_cli_documentation": _copilot,
    "openclaw": _openclaw,
    "file_editor": _openhands,
    "run_typescript": _vibe,
    "execute_bash": _nanocoder,
    "ToolSearch": _claude,
    "exec_command": _codex,
    "todowrite": _opencode,
    "read_file": _qwen,
    "submit_and_exit": _cline,
    "MultiEdit": _continue_several,
    "CheckBackgroundJob": _continue,
    "read": _pi,
    "bash": _mini_swe_agent,
}
"""By a tool that no agent above it offers."""


def _without_tools(conversation: Conversation) -> str:
    """aider's: a listing of the whole file, whose first version fails aider's test. Others ask for
    a title."""
    if "file listing" not in str(conversation.messages):
        return conversation.answer("A greeting")
    body = AFTER if COMPLAINT in conversation.question else BEFORE + "  # not yet"
    return conversation.answer(
        f"{FINAL}:\n\ngreeting.py\n```\n{body}\n```", reasoning="The whole file."
    )
