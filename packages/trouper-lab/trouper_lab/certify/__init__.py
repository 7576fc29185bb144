"""`trouper certify`: whether the documentation's promises hold here."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import attrs
import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from trouper.cli.exits import end_at_once, forget_terminal, refuse
from trouper.cli.flags import Finite
from trouper.protocol.problems import SettingsInvalid
from trouper.protocol.settings import Settings
from trouper_lab.certify.certificate import CertificatePair, Json, held, line_of
from trouper_lab.certify.certificate_files import (
    MARKS,
    NoCertificate,
    read_certificate,
    require_writable,
    write_certificate,
)
from trouper_lab.certify.making import SECTIONS, CertifyPlan, make_certificate
from trouper_lab.certify.processes import ChildProcesses, child_processes
from trouper_lab.reports import ReportName

BROKEN = 1
"""For a broken promise or an unfinished section."""


class SectionList(click.ParamType[tuple[str, ...]]):
    """Names of sections: exactness,memory."""

    name = "sections"

    def convert(
        self, value: object, param: click.Parameter | None, context: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = [name.strip() for name in str(value).split(",") if name.strip()]
        if not names:
            self.fail(f"no section is named; there are {', '.join(SECTIONS)}", param, context)
        if unknown := [name for name in names if name not in SECTIONS]:
            self.fail(
                f"{unknown[0]!r} is no section; there are {', '.join(SECTIONS)}", param, context
            )
        return tuple(name for name in SECTIONS if name in names)


@click.command
@click.option(
    "--model", metavar="DIR-OR-HUB-ID", help="Default: the embedded SmolLM2-135M-Instruct."
)
@click.option(
    "--only",
    type=SectionList(),
    default=tuple(SECTIONS),
    metavar="SECTIONS",
    help=f"Parted by commas, of: {', '.join(SECTIONS)}. Default: all.",
)
@click.option(
    "--minutes",
    type=Finite(0.1, 600),
    help=(
        "Bound of the whole. Default: 10, or 3 with --quick; three times that where kernels are "
        "compiled (CUDA)."
    ),
)
@click.option(
    "--quick",
    is_flag=True,
    help="A few requests and families of each section: whether it runs, not how fast.",
)
@click.option(
    "--out",
    type=ReportName("trouper-certificate"),
    default="trouper-certificate",
    show_default=True,
    help="Writes this name with .json and .html; in a directory, trouper-certificate.",
)
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(path_type=Path),
    metavar="A.json B.json",
    help=(
        "Compare two certificates instead; exit code 1 if a promise is newly broken in the second."
    ),
)
def certify(
    *,
    model: str | None,
    only: tuple[str, ...],
    minutes: float | None,
    quick: bool,
    out: Path,
    compare: tuple[Path, Path] | None,
) -> None:
    """Check on this device what the documentation promises: exact answers, bounds, restarts; and
    measure speed beside mlx-lm.

    About ten minutes; up to thirty on a GPU that compiles kernels. Exit code 1 if a promise is
    broken. The files may be attached to an issue: they name the device, versions and the model, and
    no directories, hosts or users.
    """
    if compare is not None:
        sys.exit(_compare(*compare))
    try:
        Settings(model=model)  # What no section could be run with is refused before the first.
        require_writable(out)
    except SettingsInvalid as invalid:
        refuse(str(invalid))
    except NoCertificate as wrong:
        refuse(f"--out: {wrong}")
    with (
        progress_shown(only) as progress,
        child_processes() as children,
        _stopped_by_signals(children) as signals,
    ):
        plan = CertifyPlan(
            model=model,
            minutes=minutes,
            quick=quick,
            only=only,
            command=_command(model),
            show=progress.show,
        )
        certificate = make_certificate(plan, children)
    try:
        where = f"written to {' and '.join(map(str, write_certificate(certificate, out)))}"
    except NoCertificate as wrong:
        where = str(wrong)
    _print_promises(certificate)
    click.echo(f"trouper certify: {line_of(certificate)}; {where}")
    sys.exit(128 + signals[0] if signals else 0 if held(certificate) else BROKEN)


@contextmanager
def _stopped_by_signals(children: ChildProcesses) -> Iterator[list[int]]:
    """End the section on a signal, everything at a second. Handlers must not raise amid Trio."""
    came: list[int] = []

    def leave(number: int, _: FrameType | None) -> None:
        if came:
            end_at_once(128 + number)
        came.append(number)
        if number == signal.SIGHUP:
            forget_terminal()
        children.stop("interrupted")

    # What is ignored stays so: `nohup` and a shell's `&` ask for that.
    numbers = [
        n
        for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(n) is not signal.SIG_IGN
    ]
    before = [(number, signal.signal(number, leave)) for number in numbers]
    try:
        yield came
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _command(model: str | None) -> str:
    words = sys.argv[1:] if len(sys.argv) > 1 and sys.argv[1] == "certify" else ["certify"]
    words = [word for word in words if not word.startswith("--out=")]
    if "--out" in words:
        index = words.index("--out")
        del words[index : index + 2]
    shown = shlex.join(["trouper", *words])
    return shown.replace(model, Path(model).name or model) if model else shown


def _print_promises(certificate: Json) -> None:
    for section in certificate["sections"]:
        reason = f" ({section['problem']})" if section["problem"] else ""
        click.echo(f"{section['name']}: {section['status']}{reason}, {section['seconds']:.0f} s")
        for promise in section["promises"]:
            click.echo(f"  {MARKS[promise['held']]}: {promise['text']}: {promise['measured']}")


def _compare(first: Path, second: Path) -> int:
    try:
        pair = CertificatePair(read_certificate(first), read_certificate(second))
    except NoCertificate as wrong:
        refuse(f"--compare: {wrong}")
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False)
    for table in pair.tables():
        console.print(table)
    if pair.not_shown:
        click.echo(f"held in the first, not shown by the second: {', '.join(pair.not_shown)}")
    broken = pair.newly_broken
    click.echo(f"newly broken: {'; '.join(broken)}" if broken else "no promise is newly broken")
    return BROKEN if broken else 0


@attrs.define(eq=False)
class CertifyProgress:
    console: Console
    bars: Progress
    sections: Sequence[str]
    total: TaskID
    current: TaskID
    printed: set[str] = attrs.field(factory=set)

    def show(self, name: str, part: float, text: str) -> None:
        """`part`: done, 0 to 1. `text`: the next measurement."""
        done = self.sections.index(name) if name in self.sections else 0
        self.bars.update(self.total, completed=done + part)
        step = f"{name}: {text}" if text else name
        self.bars.update(self.current, completed=part, description=step)
        if text and not self.console.is_terminal and step not in self.printed:
            self.printed.add(step)
            self.console.print(step, soft_wrap=True)


@contextmanager
def progress_shown(sections: Sequence[str]) -> Iterator[CertifyProgress]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        total = bars.add_task("certificate", total=len(sections))
        yield CertifyProgress(console, bars, sections, total, bars.add_task("", total=1.0))
