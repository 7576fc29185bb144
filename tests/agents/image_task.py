"""The model's side of a session with a picture: it calls the tool by which the agent reads one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from tests.agents.edit_task import Step
from tests.pictures import one, png
from tests.scripted.conversation import Conversation

NAME = "picture.png"
WIDTH, HEIGHT = 448, 224
"""Whole tokens of each family that sees, so that its engine gets the file's own pixels."""
TASK = f"Look at {NAME} and say what it shows."
FINAL = "It is a red circle"
STEP = "TROUPER_AGENT_STEP"
"""Environment variable of the scripted server: the call that it makes, as JSON."""
PATH = "{path}"
READS: Mapping[str, Step] = {
    "claude": ("Read", {"file_path": PATH}),
    "codex": ("view_image", {"path": PATH}),
    "opencode": ("read", {"filePath": PATH}),
    "qwen": ("read_file", {"file_path": PATH}),
    "cline": ("read_files", {"files": [{"path": PATH}]}),
    "pi": ("read", {"path": PATH}),
    "continue": ("Read", {"filepath": PATH}),
    "copilot": ("view", {"path": PATH}),
    "openclaw": ("read", {"path": PATH}),
    "openhands": (
        "file_editor",
        {"command": "view", "path": PATH, "security_risk": "LOW", "summary": "A picture"},
    ),
    "vibe": ("read_file", {"path": PATH}),
    "nanocoder": ("read_file", {"path": PATH}),
    "kilo": ("read", {"filePath": PATH}),
}
"""The tool by which an agent reads a file, pictures among them where it can."""


def write_picture(directory: Path, width: int = WIDTH, height: int = HEIGHT) -> bytes:
    """Draw a red circle into the directory. Returns the file's bytes."""
    data = png(one("circle", "red", width, height))
    (directory / NAME).write_bytes(data)
    return data


def step_of(agent: str, directory: Path) -> str:
    """The call as JSON, for `STEP`."""
    return json.dumps(READS[agent]).replace(PATH, str(directory / NAME))


def script(conversation: Conversation) -> str:
    offered = [str(tool["function"]["name"]) for tool in conversation.tools]
    step = os.environ.get(STEP)
    if not offered or conversation.results or not step:
        if "submit_and_exit" in offered:
            return conversation.call("submit_and_exit", summary=FINAL, verified=True)
        return conversation.answer(FINAL)
    name, arguments = json.loads(step)
    tool = next(offer for offer in sorted(offered, key=len) if offer.endswith(name))
    return conversation.calls((tool, arguments), text="Let me look.")
