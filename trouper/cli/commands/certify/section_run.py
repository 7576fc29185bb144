"""What a section is given: the model, time, a scratch directory, and what is known of device and
model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs

from trouper.cli.commands.certify.certificate import Json, SectionResult
from trouper.cli.commands.certify.engine_programs import CutShort, program_rows
from trouper.cli.commands.certify.server_runs import ServerStarter
from trouper.protocol.kv import KvLayout

NEAR_TIE_FACTOR, MIN_NEAR_TIE = 4.0, 1e-3
"""A near tie is a lead up to so many times the change that mlx-lm's own loop makes of it on this
device, and at least this."""

NOTHING: Mapping[str, str] = {}


MARGIN_S = 1.5
"""Time of a section that its programs leave it, to report what they have measured."""


class NotApplicable(Exception):
    """The section has nothing to measure for this model. The message says why."""


class NothingShown(Exception):
    """What the section is about did not happen. The message says what."""


@attrs.define(eq=False, kw_only=True)
class SectionRun:
    """A section while it runs. report: called with the part that is done, 0 to 1, and what comes
    next. current: what runs. not_reached: parts that were left out for lack of time."""

    quick: bool
    scratch: Path
    starter: ServerStarter
    device: Json
    model: Json
    kv: KvLayout
    result: SectionResult
    report: Callable[[float, str], None]
    current: str = ""
    not_reached: list[str] = attrs.field(factory=list)

    def show(self, part: float, text: str) -> None:
        self.current = text
        self.report(part, text)

    @property
    def left_s(self) -> float:
        return self.starter.children.left_s

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
        changes = [
            value
            for value in self.model.get("lead_changes", {}).values()
            if isinstance(value, float)
        ]
        return max([MIN_NEAR_TIE, *(NEAR_TIE_FACTOR * value for value in changes)])

    def rows(
        self,
        program: str,
        given: Json,
        *,
        part: float = 1.0,
        rest: str = "",
        more: Mapping[str, str] = NOTHING,
    ) -> Iterator[Json]:
        """Yield rows of a measurement of the engine; ends early when this part of the section's
        time that is left has passed, and then `rest` is not reached. `more`: variables of its
        environment."""
        try:
            yield from program_rows(
                self.starter.children, program, given, part * self.left_s - MARGIN_S, **more
            )
        except CutShort:
            self.not_reached += [rest] if rest else []

    def folder(self, name: str) -> Path:
        path = self.scratch / name
        path.mkdir()
        return path


Section = Callable[[SectionRun], None]


def first_line(error: BaseException) -> str:
    """Return an error as one line; of a group its first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
