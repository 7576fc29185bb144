"""An agent whose first prompt has a picture, and the model of examples/shapes.

The model calls no tools, and answers short questions. So Claude Code and Codex get settings of
their own by which they write little around a question.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import attrs

from tests.agents.image_sessions import new_home
from tests.agents.image_task import NAME
from tests.agents.programs import AGENTS, TASK
from tests.agents.sessions import play
from tests.image_session import Server
from tests.pictures import Picture, encoded, one, png

QUESTION = "What shape is it?"
PICTURES = (("circle", "red"), ("square", "blue"), ("cross", "green"), ("triangle", "yellow"))
SIDE = 128
INSTRUCTIONS = "instructions.md"
SHORT: Mapping[str, Sequence[str]] = {
    "claude": (
        *("-p", "--bare", "--system-prompt", "Look."),
        *("--input-format", "stream-json", "--output-format", "stream-json", "--verbose"),
    ),
    "codex": (
        *AGENTS["codex"].with_picture,
        *("-c", f"model_instructions_file={INSTRUCTIONS}"),
        *("-c", "include_environment_context=false"),
        *("-c", "include_permissions_instructions=false"),
        *("-c", "include_collaboration_mode_instructions=false"),
    ),
}
"""Claude Code reads the picture from stdin so, and adds no message about how it was read."""


@attrs.frozen
class TrainedAnswer:
    shape: str
    output: str

    @property
    def is_right(self) -> bool:
        """The model leaves the article out sometimes."""
        return f"It is a {self.shape}." in self.output or f"It is {self.shape}." in self.output


def answers(agent: str) -> list[TrainedAnswer]:
    """One for each picture."""
    with new_home() as directory, Server.running(directory / "cache", directory / "log") as server:
        return [
            TrainedAnswer(shape, _answer(agent, server.url, one(shape, color, SIDE, SIDE)))
            for shape, color in PICTURES
        ]


def _answer(agent: str, url: str, picture: Picture) -> str:
    arguments = SHORT.get(agent, AGENTS[agent].with_picture)
    line = [part.replace(TASK, QUESTION) for part in arguments]
    with new_home() as home:
        (home / "work" / NAME).write_bytes(png(picture))
        (home / "work" / INSTRUCTIONS).write_text("Look.")
        stdin = _as_stream(picture) if "stream-json" in line else ""
        return play(agent, line, url, home, stdin)[1]


def _as_stream(picture: Picture) -> str:
    """A line of Claude Code's `--input-format stream-json`."""
    source = {"type": "base64", "media_type": "image/png", "data": encoded(picture)}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    message = {"role": "user", "content": content}
    return json.dumps({"type": "user", "message": message}) + "\n"
