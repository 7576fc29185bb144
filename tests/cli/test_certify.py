"""`trouper certify`: a certificate of a tiny model, made by the command; what it says of faults;
two of them compared.

The short version makes a certificate of one section: a server is killed amid its writes, and the
next one answers from the same directory."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from tests.families import build, save
from tests.family_configs import FAMILIES, LONG, VOCABULARY
from tests.self_check.faults import FAULTS
from trouper import cli
from trouper.cli.exits import USAGE_ERROR
from trouper.engine.passes.pass_shapes import EXACT
from trouper.engine.self_check.matrix import subject_of
from trouper_lab.certify import making, progress_shown
from trouper_lab.certify.certificate import FORMAT, held, line_of
from trouper_lab.certify.certificate_files import as_html
from trouper_lab.certify.making import SECTIONS, CertifyPlan, Described, make_certificate
from trouper_lab.certify.processes import CutShort, ProgramFailed, child_processes, program_rows
from trouper_lab.certify.section_run import (
    NotApplicable,
    ProbeAnswer,
    SectionRun,
    compared,
    questions,
)
from trouper_lab.engine_programs import family_checks
from trouper_lab.engine_programs.family_checks import ScenarioError, scenario_errors

RUN = "from trouper.cli import main; main()"
ONLY = tuple(SECTIONS) if LONG else ("killing",)
Json = dict[str, Any]
SEES = Path(__file__).parent.parent.parent / "examples" / "shapes"
MADE = Path(__file__).parent.parent.parent / "docs" / "certificates" / "linux-cpu.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("private") / "tiny-llama")


@pytest.fixture(scope="module")
def made(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """By the command, from a folder that is not the repository; a user's settings must not
    count."""
    folder = tmp_path_factory.mktemp("out")
    (folder / "trouper.toml").write_text("kv_bits = 4\n")
    environment = os.environ | {
        "OPENBLAS_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TROUPER_PORT": "1",
        "TROUPER_KV_BITS": "4",
        "PYTHONPATH": str(Path(cli.__file__).parent.parent.parent),
    }
    command = [
        sys.executable,
        "-c",
        RUN,
        "certify",
        "--quick",
        "--minutes",
        "9.5",
        *([] if LONG else ["--only", *ONLY]),
        "--model",
        str(model),
        "--out",
        "certificate",
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done, folder


@pytest.fixture(scope="module")
def certificate(made: tuple[subprocess.CompletedProcess[str], Path]) -> Json:
    return dict(json.loads((made[1] / "certificate.json").read_text()))


def test_every_promise_holds_on_this_device(
    made: tuple[subprocess.CompletedProcess[str], Path], certificate: Json
) -> None:
    done, _ = made
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(section["name"], section["status"]) for section in certificate["sections"]] == [
        (name, "not run" if name == "images" else "held") for name in ONLY
    ]
    assert held(certificate)
    last = done.stdout.splitlines()[-1]
    assert last == (
        f"trouper certify: {line_of(certificate)}; written to certificate.json and certificate.html"
    )
    assert re.match(r"trouper certify: all \d+ promises held on ", last)


@pytest.mark.long
def test_answers_about_images_hold(tmp_path: Path) -> None:
    """Alone, in company, from memory, from disk and after kill -9."""
    command = [sys.executable, "-c", RUN, "certify", "--quick", "--minutes", "9.5"]
    command += ["--only", "images", "--model", str(SEES), "--out", "certificate"]
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(cli.__file__).parent.parent.parent),
    }
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [section] = json.loads((tmp_path / "certificate.json").read_text())["sections"]
    assert (section["name"], section["status"]) == ("images", "held")
    held_of = {promise["text"]: promise["held"] for promise in section["promises"]}
    hows = ("from memory", "in company", "from disk", "after kill -9")
    assert {f"answers about images {how} are those alone" for how in hows} <= held_of.keys()
    assert {*held_of.values()} == {True}
    assert section["figures"]["images_encoded"] > section["figures"]["requests"]


@pytest.mark.long
def test_it_says_what_it_was_made_with(certificate: Json) -> None:
    assert certificate["format"] == FORMAT
    assert certificate["quick"]
    assert certificate["model"]["name"] == "tiny-llama"
    assert {"trouper", "mlx", "mlx-lm"} <= certificate["versions"].keys()
    assert certificate["device"]["computes_on"] in ("CPU", "GPU")
    assert certificate["commands"][0] == "trouper certify --quick --minutes 9.5 --model tiny-llama"
    assert any(
        command.startswith("trouper serve --model tiny-llama --no-ssd --kv-memory ")
        for command in certificate["commands"]
    )
    assert any(command.startswith("mlx_lm.server --model ") for command in certificate["commands"])


@pytest.mark.long
def test_speed_stands_beside_the_bare_loop_and_mlx_lm(certificate: Json) -> None:
    """mlx_lm.server may have answered one after the other, as a busy machine lets it; then the
    certificate says so."""
    section = next(
        section for section in certificate["sections"] if section["name"] == "throughput"
    )
    figures = section["figures"]
    assert (
        figures["trouper_2_streams_tokens_per_s"] > 0 and figures["bare_2_streams_tokens_per_s"] > 0
    )
    not_together = [
        note
        for note in section["notes"]
        if note.startswith("mlx_lm.server, 2 streams: no two answers")
    ]
    assert figures["mlx_lm_server_1_streams_tokens_per_s"] > 0
    assert figures.get("mlx_lm_server_2_streams_tokens_per_s", 0) > 0 or not_together


@pytest.mark.long
def test_rows_were_preempted_under_the_limit(certificate: Json) -> None:
    section = next(section for section in certificate["sections"] if section["name"] == "memory")
    figures = section["figures"]
    assert figures["preemptions"] >= 1
    assert 0 < figures["held_bytes"] <= figures["limit_bytes"]
    assert (
        f"rows were preempted {figures['preemptions']} times" in section["promises"][1]["measured"]
    )


def test_it_names_nothing_private(
    made: tuple[subprocess.CompletedProcess[str], Path], model: Path
) -> None:
    _, folder = made
    for name in ("certificate.json", "certificate.html"):
        text = (folder / name).read_text()
        assert not [
            private
            for private in (str(folder), str(model.parent), str(Path.home()), os.uname().nodename)
            if private in text
        ]


def test_nothing_is_left_but_the_files(made: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, folder = made
    assert {path.name for path in folder.iterdir()} == {
        "certificate.json",
        "certificate.html",
        "trouper.toml",
        "cache",
    }
    assert not [*(folder / "cache" / "trouper").glob("certify-*")]


@pytest.mark.long
def test_the_page_needs_nothing_else(certificate: Json) -> None:
    page = as_html(certificate)
    assert not re.search(r"(src|href)=|url\(|@import", page)
    assert "prefers-color-scheme: dark" in page
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(drawing)
    assert page.count("<svg") >= 3
    for section in certificate["sections"]:
        assert section["title"] in page


def test_text_of_a_model_is_escaped(certificate: Json) -> None:
    other = copy.deepcopy(certificate)
    other["model"]["name"] = "<script>"
    other["sections"][0]["promises"][0]["measured"] = "<img>"
    assert "<script>" not in as_html(other) and "<img>" not in as_html(other)


# -- comparing -----------------------------------------------------------------------------------


def compare(first: Path, second: Path) -> tuple[int, str]:
    result = CliRunner().invoke(cli.main, ["certify", "--compare", str(first), str(second)])
    return result.exit_code, result.output


@pytest.mark.long
def test_equal_certificates_have_nothing_newly_broken(
    made: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    path = made[1] / "certificate.json"
    code, text = compare(path, path)
    assert code == 0
    assert "no promise is newly broken" in text
    assert "throughput.bare_1_streams_tokens_per_s" in text and " 1.00" in text


@pytest.mark.long
def test_what_is_newly_broken_is_named(
    made: tuple[subprocess.CompletedProcess[str], Path], certificate: Json, tmp_path: Path
) -> None:
    worse = copy.deepcopy(certificate)
    worse["sections"][0]["promises"][0]["held"] = False
    worse["sections"][1]["status"] = "failed"
    (tmp_path / "worse.json").write_text(json.dumps(worse))
    code, text = compare(made[1] / "certificate.json", tmp_path / "worse.json")
    assert code == 1
    broken = certificate["sections"][0]["promises"][0]["text"]
    assert f"newly broken: exactness: {broken}; families" in text
    unknown = copy.deepcopy(certificate)
    unknown["sections"][0]["promises"][0]["held"] = None
    (tmp_path / "unknown.json").write_text(json.dumps(unknown))
    worse["sections"][1]["status"] = "held"
    (tmp_path / "wrong.json").write_text(json.dumps(worse))
    code, text = compare(tmp_path / "unknown.json", tmp_path / "wrong.json")
    assert code == 0, "the first does not say that it held"
    code, text = compare(tmp_path / "worse.json", tmp_path / "worse.json")
    assert code == 0, "it was broken before"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "other"}'])
def test_a_file_that_is_no_certificate_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    code, text = compare(tmp_path / "a.json", tmp_path / "a.json")
    assert code == USAGE_ERROR
    assert "a.json" in text


# -- faults --------------------------------------------------------------------------------------


def fine(run: SectionRun) -> None:
    run.result.promise("one", held=True, measured="so it is")


def wrong(run: SectionRun) -> None:
    run.result.promise("two", held=False, measured="it is not so")


def raising(run: SectionRun) -> None:
    raise ExceptionGroup("several", [ValueError("it broke\nin two lines")])


def unfinished(run: SectionRun) -> None:
    run.result.promise("three", held=None, measured="0 models")


def needless(run: SectionRun) -> None:
    raise NotApplicable("nothing to see")


def describe_as_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take device and model from a certificate of the documentation: two processes find them
    out."""
    certificate = json.loads(MADE.read_text())
    described = Described(device=certificate["device"], model=certificate["model"])
    monkeypatch.setattr(making, "_described", lambda *_: described)


def test_a_section_that_fails_does_not_stop_the_others(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe_as_made(monkeypatch)
    entries = {
        function.__name__: (function.__name__, 1.0, function)
        for function in (raising, wrong, unfinished, needless, fine)
    }
    shown: list[str] = []
    plan = CertifyPlan(
        model=str(model),
        minutes=1.0,
        quick=True,
        only=tuple(entries),
        command="trouper certify",
        show=lambda name, part, text: shown.append(name),
        sections=entries,
    )
    with child_processes() as children:
        certificate = json.loads(json.dumps(make_certificate(plan, children)))
    found = {
        section["name"]: (section["status"], section["problem"])
        for section in certificate["sections"]
    }
    assert found == {
        "raising": ("failed", "ValueError: it broke in two lines"),
        "wrong": ("broken", ""),
        "unfinished": ("failed", "nothing was compared in its time; give it more by --minutes"),
        "needless": ("not run", "nothing to see"),
        "fine": ("held", ""),
    }
    assert not held(certificate)
    assert line_of(certificate).startswith(
        "1 of 2 promises was broken (wrong: two) and raising, unfinished could not be run to the "
        "end on "
    )
    assert shown[0] == "device" and set(shown) == {"device", *entries}


@pytest.mark.long
def test_a_directory_without_a_model_is_the_problem_of_each_section(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        cli.main,
        ["certify", "--only", "memory", "--model", str(tmp_path), "--out", str(tmp_path / "c")],
    )
    assert result.exit_code == 1
    assert "config.json" in result.output
    assert "memory could not be run to the end" in result.output.splitlines()[-1]


def test_sections_and_directories_that_are_not_there_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.main, ["certify", "--only", "speed"])
    assert result.exit_code == USAGE_ERROR and "there are exactness, families" in result.output
    result = CliRunner().invoke(cli.main, ["certify", "--out", str(tmp_path / "none" / "c")])
    assert result.exit_code == USAGE_ERROR and "there is no directory" in result.output


def test_programs_that_fail_or_take_too_long(tmp_path: Path) -> None:
    with child_processes() as children:
        with pytest.raises(ProgramFailed, match=r"config\.json"):
            list(program_rows(children, "model", {"model": str(tmp_path)}, 60.0))
        with pytest.raises(CutShort):
            list(
                program_rows(children, "families", {"jobs": [["llama", "", "float32"]] * 1000}, 1.0)
            )
        assert not children.running


def test_a_planted_fault_breaks_its_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS["blocks restored one token late"]
    broken = fault.model(build(fault.family))
    fault.caches(monkeypatch)
    found = [
        each
        for each in scenario_errors(lambda seed: subject_of(broken, VOCABULARY, seed, EXACT))
        if not each.held
    ]
    assert {each.feature for each in found} == {fault.feature}
    assert all((each.error or 0) > each.bound for each in found)


def test_a_right_model_breaks_none() -> None:
    found = list(scenario_errors(lambda seed: subject_of(build("mamba2"), VOCABULARY, seed, EXACT)))
    assert all(each.held for each in found)
    assert {each.feature for each in found if each.off} == {"prefill_together"}
    assert FAMILIES.keys() >= {"llama", "gpt_oss", "qwen3_next"}


# -- answers -------------------------------------------------------------------------------------


def answer(tokens: str, leads: tuple[float, ...] = (), logprob: float = -1.0) -> ProbeAnswer:
    return ProbeAnswer(
        tuple(map(ord, tokens)), (logprob,) * len(tokens), leads or (1.0,) * len(tokens), 0, 3
    )


def test_answers_part_at_near_ties_or_not() -> None:
    found = compared(
        [answer("abc"), answer("abc", (5.0, 0.01, 5.0))],
        [answer("abc", logprob=-1.25), answer("axc")],
    )
    assert (found.answers, found.equal, found.partings, found.logprob_change) == (
        2,
        1,
        (0.01,),
        0.25,
    )
    assert found.within(0.02) and not found.within(0.005)
    assert "others part where the best token leads by at most 0.01" in found.text(0.02)


def test_an_answer_that_ends_early_is_no_near_tie() -> None:
    assert not compared([answer("abc")], [answer("ab")]).within(100.0)


def test_two_tokens_of_one_text_are_a_tie() -> None:
    steps = [{"a": -0.1}, {"a": -0.1, "b": -0.6}]
    logprobs = {"tokens": ["a", "a"], "token_logprobs": [-0.1, -0.1], "top_logprobs": steps}
    body = {"choices": [{"logprobs": logprobs, "token_ids": [5, 6]}], "usage": {"prompt_tokens": 4}}
    assert ProbeAnswer.of(body).leads == (0.0, 0.5)


def test_questions_are_the_same_in_every_run() -> None:
    assert questions(3, 8) == questions(3, 8)
    assert len({question.prompt for question in questions(8, 8)}) == 8
    assert questions(1, 8)[0].body("s")["temperature"] == 0
    assert questions(1, 8, seeded=True)[0].body("s")["seed"] == 100


NO_KERNEL = "[quantized_matmul] No implementation for problem shape: 28x16x32x4, transpose: true"


@pytest.mark.parametrize("weights", ["4 bits", ""])
@pytest.mark.parametrize("place", ["making", "running"])
def test_packed_weights_that_mlx_has_no_kernel_for_are_no_difference(
    monkeypatch: pytest.MonkeyPatch, weights: str, place: str
) -> None:
    """Seen on CUDA: the reference of a model with products of 16 columns raises before any
    scenario."""

    def errors(make: Any) -> list[ScenarioError]:
        if place == "making":
            raise RuntimeError(NO_KERNEL)
        return [ScenarioError(feature="together", scenario="rows", problem=NO_KERNEL)]

    monkeypatch.setattr(family_checks, "scenario_errors", errors)
    row = family_checks.check("llama", weights)
    assert row["error"] is None
    assert row["no_kernel"] == bool(weights)
    assert (row["differs"] == "") == bool(weights), "plain weights have a kernel for every shape"


def test_a_pipe_gets_a_line_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_shown(["memory"]) as progress:
        for name, part, text in (
            ("device", 0.0, "device and model"),
            ("device", 0.0, "loading"),
            ("memory", 0.2, "each request alone"),
            ("memory", 0.3, "each request alone"),
            ("memory", 1.0, ""),
        ):
            progress.show(name, part, text)
    assert capsys.readouterr().err.splitlines() == [
        "device: device and model",
        "device: loading",
        "memory: each request alone",
    ]
