"""An agent's session with a picture, which its tool reads, or which is in its first prompt."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import attrs

from tests.agents import image_task
from tests.agents.programs import AGENTS, TASK
from tests.agents.sent_images import (
    SentImage,
    engine_digests,
    looks_as,
    opened,
    pixels_digest,
    sent_images,
)
from tests.agents.sessions import play, variable
from tests.scripted.process import recorded, scripted_server

SCRIPT = "tests.agents.image_task:script"
RECORD = "record.jsonl"
Way = Literal["tool", "prompt"]


@attrs.frozen(kw_only=True)
class ImageSession:
    """What became of a picture."""

    agent: str
    family: str
    way: Way
    exit_code: int | None
    answered: bool
    """The agent's output has the answer's last words."""
    sent: Sequence[SentImage]
    has_arrived: bool
    """What the agent sent looks as the file, and the engine got its pixels and no others."""
    refused: Sequence[str] = ()
    output: str = attrs.field(default="", repr=False)

    @property
    def ok(self) -> bool:
        ended = self.exit_code == 0 and self.answered and not self.refused
        return ended and self.has_arrived

    @property
    def places(self) -> str:
        """Where the picture was in the requests, and its format if it is not the file's."""
        formats = {str(opened(image.data).format) for image in self.sent} - {"PNG"}
        written = f", as {'; '.join(sorted(formats))}" if formats else ""
        return "; ".join(sorted({image.location for image in self.sent})) + written


def run(agent: str, family: str, way: Way) -> ImageSession:
    """Let the agent look at a picture. Its model is a script that calls the agent's tool, or whose
    first prompt has the picture."""
    with agent_home() as home:
        image_task.write_picture(home / "work")
        step = image_task.step_of(agent, home / "work") if way == "tool" else ""
        program = AGENTS[agent]
        arguments = program.arguments if way == "tool" else program.with_picture
        line = [part.replace(TASK, image_task.TASK) for part in arguments]
        flags = ("--family", family, "--script", SCRIPT, "--record", str(home / RECORD))
        with variable(image_task.STEP, step), scripted_server(*flags) as url:
            exit_code, output = play(agent, line, url, home)
        return ended_session(agent, family, way, home, (exit_code, output))


def ended_session(
    agent: str, family: str, way: Way, home: Path, ended: tuple[int | None, str]
) -> ImageSession:
    """Read what became of the picture from the server's record in `home`. `ended`: exit code and
    output."""
    record, picture = home / RECORD, (home / "work" / image_task.NAME).read_bytes()
    sent = sent_images(record)
    return ImageSession(
        agent=agent,
        family=family,
        way=way,
        exit_code=ended[0],
        answered=image_task.FINAL in ended[1],
        sent=sent,
        has_arrived=bool(sent)
        and all(looks_as(image.data, picture) for image in sent)
        and engine_digests(record) == {pixels_digest(image.data) for image in sent},
        refused=[
            f"{line['path']}: {line['status']} {line['answer'][:400]}"
            for line in recorded(record)
            if line["method"] == "POST" and line["status"] >= 400
        ],
        output=ended[1],
    )


@contextmanager
def agent_home() -> Iterator[Path]:
    """A home with a directory to work in."""
    with tempfile.TemporaryDirectory(
        prefix="agent-", dir=Path.cwd().parent, ignore_cleanup_errors=True
    ) as name:
        (Path(name) / "work").mkdir()
        yield Path(name)
