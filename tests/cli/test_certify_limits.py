"""A certificate keeps its time, survives an interruption, and shows preemptions or says that it
could not."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.families import save
from trouper.protocol.kv import KvLayout
from trouper_lab.certify.cache_sections import growing_rows
from trouper_lab.certify.certificate import SectionResult, held, line_of
from trouper_lab.certify.making import (
    CertifyPlan,
    Described,
    limit_of,
    make_certificate,
    run_section,
)
from trouper_lab.certify.processes import (
    ChildProcesses,
    SectionStopped,
    child_processes,
    program_rows,
)
from trouper_lab.certify.section_run import NothingShown, Section, SectionRun
from trouper_lab.certify.server_runs import ServerRun, ServerStarter

ON_ITS_TERMINAL = """
import fcntl, termios
fcntl.ioctl(2, termios.TIOCSCTTY, 0)
from trouper.cli import main
main()
"""
NEVER_ANSWERS = """
import socket, time
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    time.sleep(600)
"""

CRASHES = (
    "import sys; print('trouper is ready at http://127.0.0.1:1/v1', flush=True); "
    "sys.stderr.write('no memory\\n'); sys.exit(70)"
)


def ran(section: Section, children: ChildProcesses, scratch: Path, limit_s: float) -> SectionResult:
    plan = CertifyPlan(
        model=None,
        minutes=1.0,
        quick=True,
        only=("one",),
        command="",
        show=lambda name, part, text: None,
        sections={"one": ("One", 1.0, section)},
    )
    result = SectionResult("one", "One")
    run_section(plan, ServerStarter(None, scratch, children), Described(), result, limit_s=limit_s)
    return result


def waiting(run: SectionRun) -> None:
    """Wait for an answer that never comes, after a promise that held."""
    children = run.starter.children
    process = children.start([sys.executable, "-c", NEVER_ANSWERS], {}, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        run.result.promise("before", held=True, measured="so it is")
        run.show(0.5, "an answer")
        threading.Timer(0.1, children.stop, ("out of time",)).start()
        ServerRun(process, f"http://127.0.0.1:{port}", Path(), children).health()
    finally:
        process.stdout.close()
        process.wait()
        children.ended(process)


def fine(run: SectionRun) -> None:
    run.result.promise("one", held=True, measured="so it is")


def nothing_shown(run: SectionRun) -> None:
    run.result.promise("one", held=True, measured="so it is")
    raise NothingShown("no row was preempted")


def partly(run: SectionRun) -> None:
    fine(run)
    run.not_reached.append("the other half")


def partly_broken(run: SectionRun) -> None:
    run.result.promise("one", held=False, measured="it is not so")
    partly(run)


def test_what_waits_for_an_answer_ends_with_the_time_of_its_section(tmp_path: Path) -> None:
    with child_processes() as children:
        result = ran(waiting, children, tmp_path, 500.0)
        assert result.status == "out of time"
        assert (
            result.problem
            == "not reached in 500 s: 'an answer' and what follows; --minutes gives more"
        )
        assert [promise.text for promise in result.promises] == ["before"]
        assert not children.running
        assert ran(fine, children, tmp_path, 60.0).status == "held", (
            "the next section has its own time"
        )


@pytest.mark.parametrize(
    ("section", "status", "problem"),
    [
        (nothing_shown, "failed", "no row was preempted"),
        (partly, "out of time", "not reached in 60 s: the other half; --minutes gives more"),
        (partly_broken, "broken", "not reached in 60 s: the other half; --minutes gives more"),
    ],
)
def test_what_was_not_reached_or_not_shown_has_not_passed(
    section: Section, status: str, problem: str, tmp_path: Path
) -> None:
    with child_processes() as children:
        result = ran(section, children, tmp_path, 60.0)
    assert (result.status, result.problem) == (status, problem)


def test_a_model_that_is_not_loaded_in_time_is_the_problem_of_each_section(tmp_path: Path) -> None:
    plan = CertifyPlan(
        model=str(tmp_path),
        minutes=0.0,
        quick=True,
        only=("memory", "killing"),
        command="",
        show=lambda name, part, text: None,
    )
    with child_processes() as children:
        certificate = make_certificate(plan, children)
    problem = (
        "the model was not loaded within 0 s; trouper models pull downloads it before, --minutes "
        "gives more"
    )
    assert [(s["status"], s["problem"]) for s in certificate["sections"]] == [
        ("out of time", problem)
    ] * 2
    assert not held(certificate)
    assert line_of(certificate).startswith("memory, killing ran out of time on ")


def test_a_server_that_crashed_is_why_its_section_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = ServerStarter._started

    def crashing(self: ServerStarter, command: list[str]) -> ServerRun:
        return started(self, [command[0], "-c", CRASHES, "serve"])

    def section(run: SectionRun) -> None:
        with run.starter.trouper() as server:
            server.process.wait()
            raise ConnectionResetError("connection reset")

    monkeypatch.setattr(ServerStarter, "_started", crashing)
    with child_processes() as children:
        result = ran(section, children, tmp_path, 60.0)
    assert result.status == "failed"
    assert (
        result.problem
        == "ConnectionResetError: connection reset; trouper serve had ended: no memory"
    )


def test_a_server_that_a_section_kills_has_not_crashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = ServerStarter._started
    stays = CRASHES.replace("sys.exit(70)", "sys.stdin.close(); import time; time.sleep(600)")
    monkeypatch.setattr(
        ServerStarter,
        "_started",
        lambda self, command: started(self, [command[0], "-c", stays, "serve"]),
    )
    with child_processes() as children:
        starter = ServerStarter(None, tmp_path, children)
        with starter.trouper() as server:
            server.kill()
        assert starter.crashes == []


@pytest.mark.parametrize(
    ("minutes", "quick", "device", "limit_s"),
    [
        (None, False, {"prepares_shapes": False}, 600),
        (None, True, {"prepares_shapes": False}, 180),
        (None, False, {"prepares_shapes": True}, 1800),
        (None, False, None, 1800),
        (2.0, True, {"prepares_shapes": True}, 120),
    ],
)
def test_devices_that_compile_have_more_time(
    minutes: float | None, quick: bool, device: dict[str, Any] | None, limit_s: float
) -> None:
    plan = CertifyPlan(
        model=None,
        minutes=minutes,
        quick=quick,
        only=(),
        command="",
        show=lambda name, part, text: None,
    )
    assert plan.limit_s(device) == limit_s


def test_after_an_interruption_nothing_is_started(tmp_path: Path) -> None:
    with child_processes() as children:
        children.stop("interrupted")
        children.stop("out of time")
        assert ran(fine, children, tmp_path, 60.0).status == "interrupted"
        with pytest.raises(SectionStopped):
            children.start([sys.executable], {})


@given(
    sections=st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 1)), min_size=1, max_size=8),
    total_s=st.floats(1, 1000),
)
def test_sections_together_keep_the_time(
    sections: Sequence[tuple[float, float]], total_s: float
) -> None:
    """Each has half of its share at least, whatever part of their limits those before it used."""
    weights, left_s = [weight for weight, _ in sections], total_s
    for index, (weight, used) in enumerate(sections):
        limit_s = limit_of(weights, index, total_s, left_s)
        assert 0.499 * total_s * weight / sum(weights) <= limit_s <= left_s
        left_s -= used * limit_s


LAYOUTS = {
    "dense": KvLayout(token_bytes=1000),
    "on a GPU": KvLayout(token_bytes=147_456, lead_tokens=72),
    "without banks": KvLayout(token_bytes=1000, first_bank=None),
    "rows that share no buffers": KvLayout(token_bytes=1000, first_bank=0),
    "sliding windows": KvLayout(token_bytes=1000, snapshot_bytes=2_560_000),
    "large states": KvLayout(
        token_bytes=24_576, snapshot_bytes=200_000_000, draft_state_bytes=900_000_000
    ),
}


@pytest.mark.parametrize("count", [3, 4, 8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_any_model_fit_a_limit_and_outgrow_it(name: str, count: int) -> None:
    kv = LAYOUTS[name]
    rows = growing_rows(kv, 32_768, count, 64)
    assert rows is not None
    entering = kv.batch_bytes([(rows.prompt_tokens, rows.prompt_tokens + 1)] * count)
    assert entering + rows.limit_bytes // 64 <= rows.limit_bytes, "all enter"
    middle = rows.prompt_tokens + rows.answer_tokens // 2
    assert kv.batch_bytes([(middle, middle + 1)] * count) > rows.limit_bytes, (
        "and cannot stay together"
    )
    fits = kv.max_tokens(rows.limit_bytes)
    assert fits is None or fits >= rows.prompt_tokens + rows.answer_tokens, (
        "none is cut short alone"
    )


@pytest.mark.long
def test_rows_are_chosen_by_the_layout_that_a_server_has(tmp_path: Path) -> None:
    """The self-check of a start turns banks off for this family, and then rows grow at other
    lengths."""
    model = save("deepseek_v3", tmp_path / "tiny")
    with child_processes() as children:
        described = [
            row
            for row in program_rows(children, "model", {"model": str(model)}, 300.0)
            if "kv" in row
        ]
    assert [row["kv"]["first_bank"] for row in described] == [None]


def test_rows_that_do_not_grow_have_no_limit_that_they_outgrow() -> None:
    assert growing_rows(KvLayout(token_bytes=1, snapshot_bytes=10**9), 32_768, 4, 64) is None
    assert growing_rows(KvLayout(token_bytes=1000), 128, 4, 64) is None


def _read_on(terminal: int) -> None:
    with suppress(OSError):  # Nobody writes to it any more.
        while os.read(terminal, 4096):
            pass


@pytest.mark.parametrize("closed", [False, True], ids=["ctrl-c", "terminal closed"])
@pytest.mark.long(but=("ctrl-c",))
def test_an_interrupted_certificate_is_written_and_says_so(closed: bool, tmp_path: Path) -> None:
    """On a terminal, whose Ctrl-C goes to every process in its foreground."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", ON_ITS_TERMINAL]
    command += [
        "certify",
        "--model",
        str(tmp_path),
        "--only",
        "families",
        "--out",
        str(tmp_path / "c"),
    ]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    try:
        written = b""
        while b"device and model" not in written:
            written += os.read(ours, 4096)
        if not closed:
            os.write(ours, termios.tcgetattr(ours)[6][termios.VINTR])
            # A full terminal stops who writes to it.
            reading = threading.Thread(target=_read_on, args=(ours,))
            reading.start()
            assert process.wait(60) == 128 + signal.SIGINT
            reading.join()
        else:
            os.close(ours)
            assert process.wait(60) == 128 + signal.SIGHUP
    finally:
        process.kill()
        process.wait()
        if not closed:
            os.close(ours)
    certificate = json.loads((tmp_path / "c.json").read_text())
    [section] = certificate["sections"]
    assert section["status"] == "interrupted"
    assert re.search("families was interrupted on ", line_of(certificate))
    assert [*(tmp_path / "trouper").glob("certify-*")] == []
    assert section["name"] == "families"
