"""Runs a certificate's sections within a time."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs

from trouper import __version__
from trouper.protocol.kv import KvLayout
from trouper.protocol.names import EMBEDDED
from trouper.protocol.paths import is_directory
from trouper.protocol.private_files import make_private
from trouper.protocol.settings import default_cache_dir
from trouper_lab.certify import (
    cache_sections,
    exactness_sections,
    image_section,
    throughput_section,
)
from trouper_lab.certify.certificate import FORMAT, Json, SectionResult, Status, without_directories
from trouper_lab.certify.processes import (
    ChildProcesses,
    CutShort,
    ProgramFailed,
    SectionStopped,
    Stopped,
    program_rows,
)
from trouper_lab.certify.section_run import (
    NotApplicable,
    NothingShown,
    Section,
    SectionRun,
    first_line,
)
from trouper_lab.certify.server_runs import ServerStarter

SectionEntry = tuple[str, float, Section]
SECTIONS: dict[str, SectionEntry] = {
    "exactness": ("Answers of the model in every company", 3.0, exactness_sections.exactness),
    "families": ("Tiny models of every family", 2.0, exactness_sections.families),
    "quantized": ("Quantized weights as stored", 1.2, exactness_sections.quantized),
    "throughput": ("Throughput and gaps", 3.0, throughput_section.throughput),
    "restoring": ("Restores of cached prefixes", 1.2, cache_sections.restoring),
    "memory": ("Memory under a limit", 1.6, cache_sections.memory),
    "killing": ("kill -9 and restart", 1.6, cache_sections.killing),
    "images": ("Images in every company", 1.2, image_section.images),
}
"""Title, share of the time, function. Later sections inherit spare time."""
SCRATCH, LOCK = "certify-", "lock"
"""Of scratch directories: prefix, and the file that the process locks."""
YOUNG_S = 60.0
MINUTES, QUICK_MINUTES, PREPARING = 10.0, 3.0, 3.0
"""Default bounds (min), and a factor for compilation."""
BORROWED = 0.5
"""Part of later shares for earlier sections: servers may start slowly."""


@attrs.frozen(kw_only=True)
class CertifyPlan:
    """minutes None: the default. show: gets section, part done (0 to 1), and next measurement."""

    model: str | None
    minutes: float | None
    quick: bool
    only: Sequence[str]
    command: str
    show: Callable[[str, float, str], None]
    sections: Mapping[str, SectionEntry] = attrs.field(factory=lambda: SECTIONS)

    def limit_s(self, device: Json | None = None) -> float:
        if self.minutes is not None:
            return 60 * self.minutes
        prepares = device is None or device.get("prepares_shapes", False)
        return 60 * (QUICK_MINUTES if self.quick else MINUTES) * (PREPARING if prepares else 1)


def make_certificate(plan: CertifyPlan, children: ChildProcesses) -> Json:
    """The certificate names failures and unreached sections."""
    began, load_before = time.monotonic(), _load()
    model = (
        str(Path(plan.model).resolve()) if plan.model and is_directory(plan.model) else plan.model
    )
    with scratch_directory() as scratch:
        starter = ServerStarter(model, scratch, children)
        plan.show("device", 0.0, "device and model")
        known = _described(children, model, plan)
        starter.directory = known.model.pop("directory", "")
        results, total_s = list[SectionResult](), 0.0
        for index, name in enumerate(plan.only):
            result = SectionResult(name, plan.sections[name][0], known.status, known.problem)
            if not known.problem:
                left_s = plan.limit_s(known.device) - (time.monotonic() - began)
                total_s = total_s or left_s
                limit_s = limit_of(
                    [plan.sections[each][1] for each in plan.only], index, total_s, left_s
                )
                run_section(plan, starter, known, result, limit_s=limit_s)
            results.append(result)
    device = dict(known.device)
    packages = device.pop("packages", {})
    certificate = {
        "format": FORMAT,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began, 1),
        "quick": plan.quick,
        "command": plan.command,
        "system": _system() | {"load_before": load_before, "load_after": _load()},
        "device": {
            key: value for key, value in device.items() if key not in ("families", "formats")
        },
        "versions": {"trouper": __version__, **packages},
        "model": {"name": _name(plan.model), **known.model},
        "sections": [attrs.asdict(result) for result in results],
        "commands": [plan.command, *starter.commands],
    }
    return without_directories(certificate, _names(starter))


def _names(starter: ServerStarter) -> Mapping[str, str]:
    models = {
        directory: Path(directory).name for directory in (starter.model or "", starter.directory)
    }
    # Path raises without a home.
    return {os.path.expanduser("~"): "~", **models, str(starter.scratch): "SCRATCH"}  # noqa: PTH111


def limit_of(weights: Sequence[float], index: int, total_s: float, left_s: float) -> float:
    """A section's longest time in seconds. `total_s`: of all."""
    kept_s = (1 - BORROWED) * total_s * sum(weights[index + 1 :]) / sum(weights)
    return max(left_s - kept_s, 0.0)


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """On the SSD tier's disk: /tmp may be memory."""
    parent = default_cache_dir()
    try:
        make_private(parent)
        folder = tempfile.TemporaryDirectory(prefix=SCRATCH, dir=parent, ignore_cleanup_errors=True)
    except OSError:
        folder = tempfile.TemporaryDirectory(
            prefix=f"trouper-{SCRATCH}", ignore_cleanup_errors=True
        )
    with folder as name, (Path(name) / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove_abandoned(parent)
        yield Path(name)


def _remove_abandoned(parent: Path) -> None:
    """Remove unlocked scratch directories, of killed certificates."""
    for path in parent.glob(f"{SCRATCH}*/{LOCK}"):
        with suppress(OSError), path.open() as lock:
            if time.time() - path.stat().st_mtime < YOUNG_S:  # Its process may be about to lock it.
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


@attrs.define
class Described:
    """problem: why a description failed; sections then have `status`."""

    device: Json = attrs.field(factory=dict)
    model: Json = attrs.field(factory=dict)
    kv: KvLayout = attrs.field(factory=KvLayout)
    status: Status = "not run"
    problem: str = ""


def _described(children: ChildProcesses, model: str | None, plan: CertifyPlan) -> Described:
    found, limit_s = Described(), plan.limit_s()
    try:
        with children.limited(limit_s):
            for row in program_rows(children, "device", {}, limit_s):
                found.device |= row
            for row in program_rows(children, "model", {"model": model}, limit_s):
                if stage := row.pop("stage", ""):
                    plan.show("device", 0.0, stage)
                found.model |= row
    except ProgramFailed as failed:
        found.status, found.problem = "failed", str(failed)
    except (CutShort, SectionStopped):
        found.status, found.problem = "interrupted", "before it began"
        if children.stopped != "interrupted":
            found.status = "out of time"
            found.problem = (
                f"the model was not loaded within {limit_s:.0f} s; trouper models pull downloads "
                "it before, --minutes gives more"
            )
    found.kv = KvLayout(**found.model.pop("kv", {}))
    return found


def run_section(
    plan: CertifyPlan,
    starter: ServerStarter,
    known: Described,
    result: SectionResult,
    *,
    limit_s: float,
) -> None:
    """Run a section. Exceptions become results."""
    name, began, children = result.name, time.monotonic(), starter.children
    run = SectionRun(
        quick=plan.quick,
        scratch=starter.scratch,
        starter=starter,
        device=known.device,
        model=known.model,
        kv=known.kv,
        result=result,
        report=lambda part, text: plan.show(name, part, text),
        current=result.title,
    )
    plan.show(name, 0.0, result.title)
    finished = False
    starter.crashes.clear()
    try:
        with children.limited(limit_s):
            children.check()
            plan.sections[name][2](run)
        finished = True
        held = [promise.held for promise in result.promises]
        result.status = "held" if True in held or not held else "failed"
        if held and not {True, False}.intersection(held):
            result.problem = "nothing was compared in its time; give it more by --minutes"
    except NotApplicable as reason:
        result.problem = str(reason)
    except NothingShown as reason:
        result.status, result.problem = "failed", str(reason)
    except Exception as error:  # noqa: BLE001 - a section that fails does not stop the others
        result.status, result.problem = "failed", "; ".join([first_line(error), *starter.crashes])
    _judge(run, children.stopped, finished=finished, limit_s=limit_s)
    result.seconds = round(time.monotonic() - began, 1)
    plan.show(name, 1.0, "")


def _judge(run: SectionRun, stopped: Stopped, *, finished: bool, limit_s: float) -> None:
    """Errors of a stopped section follow from ended processes."""
    result = run.result
    if stopped == "interrupted" and not finished:
        result.status, result.problem = "interrupted", f"at {run.current!r}"
    elif stopped == "out of time" and not finished:
        run.not_reached.append(f"{run.current!r} and what follows")
    if run.not_reached:
        result.status = "out of time"
        result.problem = (
            f"not reached in {max(limit_s, 0):.0f} s: {', '.join(run.not_reached)}; --minutes "
            "gives more"
        )
    if False in [promise.held for promise in result.promises]:
        result.status = "broken"


def _name(model: str | None) -> str:
    return (
        EMBEDDED if model is None else Path(model).resolve().name if is_directory(model) else model
    )


def _system() -> dict[str, Any]:
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"
