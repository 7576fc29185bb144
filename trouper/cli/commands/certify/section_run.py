"""What a section is given: the model, time, a scratch directory, and what is known of device and model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from trouper.cli.commands.certify.certificate import Json, SectionResult
from trouper.cli.commands.certify.engine_programs import CutShort, program_rows
from trouper.cli.commands.certify.server_runs import ServerStarter

NEAR_TIE_FACTOR, MIN_NEAR_TIE = 4.0, 1e-3
"""A near tie is a lead up to so many times the change that mlx-lm's own loop makes of it on this device, and at least this."""

NOTHING: Mapping[str, str] = {}


class NotApplicable(Exception):
    """The section has nothing to measure for this model. The message says why."""


@attrs.define(eq=False, kw_only=True)
class SectionRun:
    """A section while it runs. deadline: of `time.monotonic`. show: called with the part that is done, 0 to 1, and what comes next."""

    quick: bool
    scratch: Path
    starter: ServerStarter
    device: Json
    model: Json
    result: SectionResult
    deadline: float
    show: Callable[[float, str], None]

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def on_cpu(self) -> bool:
        return bool(self.device.get("computes_on") == "CPU")

    @property
    def exact(self) -> bool:
        """Whether the device computes so that equal tokens are promised: in full float32."""
        return bool(self.model.get("arithmetic") == "float32")

    @property
    def near_tie(self) -> float:
        """Lead, in log-probability, up to which another kernel may prefer another token."""
        changes = [value for value in self.model.get("lead_changes", {}).values() if isinstance(value, float)]
        return max([MIN_NEAR_TIE, *(NEAR_TIE_FACTOR * value for value in changes)])

    def rows(
        self, program: str, given: Json, *, part: float = 1.0, min_s: float = 1.0, more: Mapping[str, str] = NOTHING
    ) -> Iterator[Json]:
        """Yield rows of a measurement of the engine; ends early, with a note, when this part of the section's time that is left has
        passed, and no sooner than after `min_s` seconds. `more`: variables of its environment."""
        try:
            yield from program_rows(self.starter.children, program, given, max(part * self.left_s, min_s), **more)
        except CutShort:
            note = "stopped when the time of this section had passed; --minutes gives it more"
            if note not in self.result.notes:
                self.result.notes.append(note)

    def folder(self, name: str) -> Path:
        path = self.scratch / name
        path.mkdir()
        return path


Section = Callable[[SectionRun], None]


def until(look: Callable[[], Any], limit_s: float) -> bool:
    """Look again and again until it is so; False when the time has passed. A server announces its states only in /health."""
    end = time.monotonic() + limit_s
    while not look():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
