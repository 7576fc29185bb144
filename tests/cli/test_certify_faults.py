"""What `trouper certify` says of wrong options, files and processes, and what it leaves behind."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.cli.test_certify import describe_as_made
from tests.families import save
from trouper import cli
from trouper.cli.exits import USAGE_ERROR
from trouper_lab import certify
from trouper_lab.certify import throughput_section
from trouper_lab.certify.certificate import FORMAT, CertificatePair, line_of, without_directories
from trouper_lab.certify.certificate_files import NoCertificate, write_certificate
from trouper_lab.certify.making import CertifyPlan, make_certificate, scratch_directory
from trouper_lab.certify.processes import ProgramFailed, child_processes, last_words
from trouper_lab.certify.section_run import SectionRun
from trouper_lab.certify.server_runs import ServerFailed, ServerRun, ServerStarter
from trouper_lab.reports import ReportName

Json = dict[str, Any]
MADE = Path(__file__).parent.parent.parent / "docs" / "certificates" / "linux-cpu.json"


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(cli.main, ["certify", *arguments])
    assert result.exit_code == USAGE_ERROR, result.output
    return result.output


def test_what_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    read_only = "/proc" if Path("/proc").is_dir() else "/System"  # Also for root.
    assert f"{read_only} cannot be written to" in refused("--out", f"{read_only}/certificate")
    (tmp_path / "c.html").mkdir()
    assert "c.html is a directory" in refused("--out", str(tmp_path / "c"))
    assert "there is no directory" in refused("--out", str(tmp_path / "none" / "c"))
    assert [path.name for path in tmp_path.iterdir()] == ["c.html"]


def test_an_empty_model_and_minutes_that_are_no_number_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by use: an unset variable as --model made a certificate of nothing, and no time was
    ever up after NaN minutes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(certify, "make_certificate", None)
    assert refused("--model", "").startswith("trouper: --model is empty; ")
    for minutes in ("nan", "inf", "-inf"):
        assert "--minutes" in refused("--minutes", minutes)
    assert list(tmp_path.iterdir()) == []


def test_a_report_goes_into_a_directory_and_its_suffix_is_no_part_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by use: `--out DIR/` wrote DIR.json beside the directory, and `--out c.json` wrote
    c.json.json."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "trouper-certificate.json").mkdir()
    for out in ("reports", "reports/", "./reports", f"{tmp_path}/reports/"):
        assert "reports/trouper-certificate.json is a directory" in refused("--out", out)
    (tmp_path / "c.html").mkdir()
    for out in ("c", "c.json"):
        assert refused("--out", out) == "trouper: --out: c.html is a directory\n"
    assert (
        refused("--out", "none/")
        == f"trouper: --out: none/trouper-certificate: there is no directory {tmp_path}/none\n"
    )
    assert "it is empty" in refused("--out", "")
    kind = ReportName("trouper-certificate")
    assert [kind.convert(out, None, None) for out in (".", "c.html/x", "v1.2", "c.html")] == [
        Path("trouper-certificate"),
        Path("c.html/x"),
        Path("v1.2"),
        Path("c.html/trouper-certificate"),
    ]


@pytest.mark.parametrize("only", ["", ",", "exactnes", "memory,speed"])
def test_sections_that_are_not_there_are_refused(only: str) -> None:
    assert "there are exactness, families" in refused("--only", only)


def test_a_certificate_is_written_as_one(tmp_path: Path) -> None:
    certificate = json.loads(MADE.read_text())
    assert write_certificate(certificate, tmp_path / "c") == [
        tmp_path / "c.json",
        tmp_path / "c.html",
    ]
    assert json.loads((tmp_path / "c.json").read_text()) == certificate
    (tmp_path / "d.json").mkdir()
    with pytest.raises(NoCertificate, match=r"d\.json cannot be written"):
        write_certificate(certificate, tmp_path / "d")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.html", "c.json", "d.json"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is no JSON"),
        (
            '{"format": "trouper-certificate/7"}',
            "has the format trouper-certificate/7, which another version of trouper wrote",
        ),
        ('{"format": 3}', "is no certificate; give the .json"),
        (f'{{"format": "{FORMAT}"}}', "is not complete"),
        (
            json.dumps(json.loads(MADE.read_text()) | {"sections": [{"name": "memory"}]}),
            "is not complete",
        ),
    ],
)
def test_files_that_cannot_be_compared_say_why(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    text = refused("--compare", str(tmp_path / "a.json"), str(MADE))
    assert "a.json" in text and reason in text
    assert "Is a directory" in refused("--compare", str(MADE), str(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"figures": None},
        {"figures": {"rate": "fast"}},
        {"promises": "x"},
        {"promises": [{"text": "one"}]},
    ],
)
def test_a_certificate_whose_sections_are_damaged_breaks_no_promise(
    changes: Json, tmp_path: Path
) -> None:
    """Exit code 1 would say that a promise is newly broken."""
    damaged = tmp_path / "a.json"
    damaged.write_text(json.dumps(with_section(0, **changes)))
    assert "is not complete" in refused("--compare", str(MADE), str(damaged))
    damaged.write_text(json.dumps(json.loads(MADE.read_text()) | {"device": None, "system": {}}))
    assert "is not complete" in refused("--compare", str(MADE), str(damaged))


def test_a_server_that_breaks_off_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Starting\nTraceback\nRuntimeError: no stream in this thread\n\n")
    with child_processes() as children:
        process = children.start([sys.executable, "-c", ""], {})
        server = ServerRun(process, "http://127.0.0.1:1", log, children)
        reason = throughput_section._reason(server, ConnectionResetError("reset by peer"))
        log.write_text("")
        silent = throughput_section._reason(server, ConnectionResetError("reset by peer"))
        server.stop()
    assert reason == f"{silent}; it wrote: RuntimeError: no stream in this thread"
    assert "reset by peer" in silent


def with_section(number: int, **changes: Any) -> Json:
    certificate: Json = json.loads(MADE.read_text())
    certificate["sections"][number] |= changes
    return certificate


def test_certificates_of_versions_with_other_promises_are_compared() -> None:
    first = with_section(0)
    promise = {"text": "a promise of a later version", "held": False, "measured": "it is not so"}
    broken = CertificatePair(first, with_section(0, status="broken", promises=[promise]))
    assert (broken.newly_broken, broken.not_shown) == (["exactness"], [])
    late = CertificatePair(first, with_section(0, status="out of time"))
    assert (late.newly_broken, late.not_shown) == ([], ["exactness"])
    fewer = with_section(0)
    del fewer["sections"][0]
    assert CertificatePair(first, fewer).not_shown == ["exactness"]
    assert CertificatePair(fewer, first).not_shown == []


def test_a_certificate_without_promises_does_not_say_that_they_held() -> None:
    certificate = json.loads(MADE.read_text())
    certificate["sections"] = [
        section for section in certificate["sections"] if section["name"] == "throughput"
    ]
    assert line_of(certificate).startswith("measured, with nothing to be held, on ")


def test_one_promise_is_no_promises() -> None:
    """Found by use, of `--only restarts`: "all 1 promises held"."""

    def line(*statuses: tuple[str, bool]) -> str:
        sections = [
            {"name": status, "status": status, "promises": [{"text": "it does", "held": held}]}
            for status, held in statuses
        ]
        return line_of(json.loads(MADE.read_text()) | {"sections": sections}).partition(" on ")[0]

    assert line(("held", True)) == "1 promise held"
    assert line(("held", True), ("held", True)) == "all 2 promises held"
    assert line(("broken", False)) == "1 of 1 promise was broken (broken: it does)"
    assert line(("broken", False), ("broken", False)).startswith("2 of 2 promises were broken ")
    late = line_of(
        json.loads(MADE.read_text())
        | {
            "sections": [
                {
                    "name": "memory",
                    "status": "out of time",
                    "promises": [{"text": "it does", "held": True}],
                }
            ]
        }
    )
    assert late.endswith("; 1 promise held")


def test_why_a_process_ended_is_one_line() -> None:
    assert last_words("Traceback\n  x\nValueError: no\n\n", 1) == "ValueError: no"
    assert "memory is short" in last_words("loading\n", -signal.SIGKILL)
    assert last_words("", -signal.SIGSEGV) == "it crashed (SIGSEGV)"
    assert last_words("libc++abi: no\n", -signal.SIGABRT) == "it crashed (SIGABRT): libc++abi: no"
    assert last_words("", 3) == "it ended with 3 and wrote nothing"


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with child_processes() as children:
        starter = ServerStarter(None, tmp_path, children)
        with pytest.raises(ServerFailed, match="no-such-flag"), starter.trouper("--no-such-flag"):
            pass
        assert not children.running


def test_what_killed_certificates_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    locks = {
        name: tmp_path / "trouper" / f"certify-{name}" / "lock"
        for name in ("killed", "young", "running")
    }
    for name, lock in locks.items():
        lock.parent.mkdir(parents=True)
        lock.touch()
        if name != "young":
            os.utime(lock, (0, 0))
    with locks["running"].open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with scratch_directory() as scratch:
            found = {
                path
                for path in (tmp_path / "trouper").iterdir()
                if path.name.startswith("certify-")
            }
            assert found == {locks["young"].parent, locks["running"].parent, scratch}
    assert not scratch.exists()


def test_errors_of_a_section_name_no_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a program wrote last is quoted, and it may have quoted a path."""
    describe_as_made(monkeypatch)
    model, texts = save("llama", tmp_path / "tiny-llama"), list[str]()

    def failing(run: SectionRun) -> None:
        texts.extend([str(model), str(run.scratch), str(Path.home() / "notes"), sys.prefix])
        run.result.notes.append(
            f"without mlx_lm.server: {model} and '{model.parent / 'a'}', http://127.0.0.1:1/v1/a/b"
        )
        raise ProgramFailed(
            f"{model}/config.json: no key, in {run.scratch}/x, {Path.home() / 'notes'} "
            f"({sys.prefix})"
        )

    plan = CertifyPlan(
        model=str(model),
        minutes=1.0,
        quick=True,
        only=("failing",),
        command="trouper certify",
        show=lambda name, part, text: None,
        sections={"failing": ("failing", 1.0, failing)},
    )
    with child_processes() as children:
        certificate = make_certificate(plan, children)
    [section] = certificate["sections"]
    assert not [text for text in texts if text in json.dumps(certificate)]
    assert section["notes"] == [
        "without mlx_lm.server: tiny-llama and 'a', http://127.0.0.1:1/v1/a/b"
    ]
    assert section["problem"] == (
        "ProgramFailed: tiny-llama/config.json: no key, in SCRATCH/x, notes "
        f"({Path(sys.prefix).name})"
    )


def test_a_certificate_without_paths_stays_what_it_was() -> None:
    for path in MADE.parent.glob("*.json"):
        certificate = json.loads(path.read_text())
        assert without_directories(certificate, {"/home/alice": "~", "": ""}) == certificate
