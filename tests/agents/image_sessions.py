"""An agent's session with a picture, which its tool reads, or which is in its first prompt."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import attrs

from tests.agents import image_task
from tests.agents.install import install
from tests.agents.programs import AGENTS, TASK
from tests.agents.sent_images import SentImage, engine_digests, pixels_digest, sent_images
from tests.agents.sessions import play, variable
from tests.scripted.process import recorded, scripted_server

SCRIPT = "tests.agents.image_task:script"
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
    is_same_file: bool
    """The agent sent the file's own bytes."""
    has_arrived: bool
    """The engine got the file's pixels, and no others."""
    refused: Sequence[str] = ()
    output: str = attrs.field(default="", repr=False)

    @property
    def ok(self) -> bool:
        ended = self.exit_code == 0 and self.answered and not self.refused
        return ended and self.has_arrived

    @property
    def places(self) -> str:
        return "; ".join(sorted({image.place for image in self.sent}))


def run(agent: str, family: str, way: Way) -> ImageSession:
    install(agent)
    with place() as home:
        data = image_task.write_picture(home / "work")
        record = home / "record.jsonl"
        step = image_task.step_of(agent, home / "work") if way == "tool" else ""
        flags = ("--family", family, "--script", SCRIPT, "--record", str(record))
        with variable(image_task.STEP, step), scripted_server(*flags) as url:
            exit_code, output = play(agent, _arguments(agent, way), url, home)
        sent, seen = sent_images(record), engine_digests(record)
        return ImageSession(
            agent=agent,
            family=family,
            way=way,
            exit_code=exit_code,
            answered=image_task.FINAL in output,
            sent=sent,
            is_same_file={image.data for image in sent} == {data},
            has_arrived=set(seen) == {pixels_digest(data)},
            refused=[
                f"{line['path']}: {line['status']} {line['answer'][:400]}"
                for line in recorded(record)
                if line["method"] == "POST" and line["status"] >= 400
            ],
            output=output,
        )


@contextmanager
def place() -> Iterator[Path]:
    """A home with a directory to work in."""
    with tempfile.TemporaryDirectory(
        prefix="agent-", dir=Path.cwd().parent, ignore_cleanup_errors=True
    ) as name:
        (Path(name) / "work").mkdir()
        yield Path(name)


def _arguments(agent: str, way: Way, task: str = image_task.TASK) -> list[str]:
    program = AGENTS[agent]
    arguments = program.arguments if way == "tool" else program.with_picture
    return [part.replace(TASK, task) for part in arguments]
