"""Makes a certificate: describes device and model, then runs the sections one after another within the time that was given."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs

from trouper import __version__
from trouper.cli.commands.certify import cache_sections, exactness_sections, throughput_section
from trouper.cli.commands.certify.certificate import FORMAT, Json, SectionResult
from trouper.cli.commands.certify.child_processes import ChildProcesses, child_processes
from trouper.cli.commands.certify.engine_programs import CutShort, ProgramFailed, program_rows
from trouper.cli.commands.certify.section_run import NotApplicable, Section, SectionRun
from trouper.cli.commands.certify.server_runs import ServerStarter
from trouper.protocol.names import EMBEDDED
from trouper.protocol.settings import default_cache_dir

SectionEntry = tuple[str, float, Section]
SECTIONS: dict[str, SectionEntry] = {
    "exactness": ("Answers of the model in every company", 3.0, exactness_sections.exactness),
    "families": ("Tiny models of every family", 2.0, exactness_sections.families),
    "quantized": ("Quantized weights as stored", 1.2, exactness_sections.quantized),
    "throughput": ("Throughput and gaps", 2.4, throughput_section.throughput),
    "restoring": ("Restores of cached prefixes", 1.0, cache_sections.restoring),
    "memory": ("Memory under a limit", 1.2, cache_sections.memory),
    "killing": ("kill -9 and restart", 1.2, cache_sections.killing),
}
"""Sections by name: title, share of the time, and what runs. A section that needs less leaves the rest to those after it."""
LOADING_S = 600.0
"""Longest time to describe device and model, which includes loading it."""


@attrs.frozen(kw_only=True)
class CertifyPlan:
    """What was asked for. show: called with the name of a section, the part of it that is done, and what comes next."""

    model: str | None
    minutes: float
    quick: bool
    only: Sequence[str]
    command: str
    show: Callable[[str, float, str], None]
    sections: Mapping[str, SectionEntry] = attrs.field(factory=lambda: SECTIONS)


def make_certificate(plan: CertifyPlan) -> Json:
    """Run everything, and return the certificate. What fails is in it."""
    began, load_before = time.monotonic(), _load()
    model = str(Path(plan.model).resolve()) if plan.model and Path(plan.model).is_dir() else plan.model
    with _scratch() as scratch, child_processes() as children:
        starter = ServerStarter(model, scratch, children)
        plan.show("device", 0.0, "device and model")
        device, described, problem = _described(children, model)
        starter.directory = described.pop("directory", "")
        results = (
            [SectionResult(name, plan.sections[name][0], "failed", problem) for name in plan.only] if problem else []
        )
        for index, name in enumerate(() if problem else plan.only):
            share = plan.sections[name][1] / sum(plan.sections[later][1] for later in plan.only[index:])
            left_s = plan.minutes * 60 - (time.monotonic() - began)
            results.append(_run(plan, name, starter, device, described, limit_s=max(left_s, 0.0) * share))
    packages = device.pop("packages", {}) if device else {}
    return {
        "format": FORMAT,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began, 1),
        "quick": plan.quick,
        "command": plan.command,
        "system": _system() | {"load_before": load_before, "load_after": _load()},
        "device": {key: value for key, value in device.items() if key not in ("families", "formats")},
        "versions": {"trouper": __version__, **packages},
        "model": {"name": _name(plan.model), **described},
        "sections": [attrs.asdict(result) for result in results],
        "commands": [plan.command, *starter.commands],
    }


@contextmanager
def _scratch() -> Iterator[Path]:
    """Make a directory on the disk that the SSD tier would have: /tmp may be memory. It is removed at the end."""
    parent = default_cache_dir()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="certify-", dir=parent, ignore_cleanup_errors=True)
    except OSError:
        folder = tempfile.TemporaryDirectory(prefix="trouper-certify-", ignore_cleanup_errors=True)
    with folder as name:
        yield Path(name)


def _described(children: ChildProcesses, model: str | None) -> tuple[Json, Json, str]:
    """Describe device and model. The third is why one of them could not be, or ""."""
    device: Json = {}
    described: Json = {}
    try:
        for row in program_rows(children, "device", {}, LOADING_S):
            device |= row
        for row in program_rows(children, "model", {"model": model}, LOADING_S):
            described |= row
    except ProgramFailed as failed:
        return device, described, str(failed)
    except CutShort:
        return device, described, f"the model was not loaded within {LOADING_S:.0f} s"
    return device, described, ""


def _run(
    plan: CertifyPlan, name: str, starter: ServerStarter, device: Json, model: Json, *, limit_s: float
) -> SectionResult:
    """Run a section. Whatever it raises is its result, and the next one runs."""
    title, _, section = plan.sections[name]
    result, began = SectionResult(name, title), time.monotonic()
    run = SectionRun(
        quick=plan.quick, scratch=starter.scratch, starter=starter, device=device, model=model, result=result,
        deadline=began + limit_s, show=lambda part, text: plan.show(name, part, text),
    )  # fmt: skip
    plan.show(name, 0.0, title)
    try:
        section(run)
        held = [promise.held for promise in result.promises]
        result.status = "broken" if False in held else "held" if True in held or not held else "failed"
        if result.status == "failed":
            result.problem = "nothing was compared in its time; give it more by --minutes"
    except NotApplicable as reason:
        result.problem = str(reason)
    except Exception as error:  # noqa: BLE001 - a section that fails does not stop the others
        result.status, result.problem = "failed", _line(error)
    result.seconds = round(time.monotonic() - began, 1)
    plan.show(name, 1.0, "")
    return result


def _line(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _name(model: str | None) -> str:
    """Name the model without the user's directories."""
    return EMBEDDED if model is None else Path(model).resolve().name if Path(model).is_dir() else model


def _system() -> dict[str, Any]:
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }


def _load() -> str:
    """Return the load average of the last minute, which says what else the machine does."""
    return f"{os.getloadavg()[0]:.1f}"
