"""One verdict and one reason: `serve`, `models info`, `models ls` and `doctor` on directories that
are broken, odd or of another format."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.broken_directories import CASES, build
from tests.families import save
from trouper import ServerSettings, Settings, cli
from trouper.cli import doctor_checks
from trouper.engine.loading.model_loading import load
from trouper.protocol.problems import ModelUnusable


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("sound"))


@pytest.mark.parametrize("name", CASES)
def test_all_commands_give_one_reason(name: str, sound: Path, tmp_path: Path) -> None:
    directory = build(name, sound, tmp_path / "models" / "model")
    settings = Settings(model=str(directory), self_check="off")
    reason = message = ""
    try:
        load(settings, lambda _: None)
    except ModelUnusable as unusable:
        reason, message = str(unusable), unusable.message
    words = CASES[name].words
    assert re.search(words, reason) if words else reason == ""
    assert "\n" not in reason and str(directory) in (reason or str(directory))
    assert info(directory) == reason
    [finding] = doctor_checks.model(doctor_checks.CheckedSettings([settings], ServerSettings()))
    assert (finding.level == "fail") == bool(reason)
    assert not reason or finding.message == message


@pytest.mark.parametrize("name", ["sound", "a layer too many", "FP8", "tekken", "weights cut"])
def test_a_list_of_models_gives_the_same_reason(name: str, sound: Path, tmp_path: Path) -> None:
    directory = build(name, sound, tmp_path / "models" / "model")
    reason = info(directory)
    assert bool(reason) == bool(CASES[name].words) and listed(directory) == reason
    assert listed(directory) == reason, "a remembered verdict is the same"


MODES: dict[str, tuple[str, int, str]] = {
    "read alone": (".", 0o555, ""),
    "not searchable": (".", 0o444, "Permission denied"),
    "not listable": (".", 0o111, "Permission denied"),
    "config": ("config.json", 0o000, "config.json cannot be read: .*Permission denied"),
    "weights": ("model.safetensors", 0o000, "model.safetensors cannot be read: .*Permission"),
    "tokenizer": ("tokenizer.json", 0o000, "tokenizer.json cannot be read: .*Permission denied"),
}


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A directory that everybody may search, and a user whom modes of files bind."""
    shared = Path(tempfile.mkdtemp(dir="/tmp"))
    shared.chmod(0o755)
    is_root = os.geteuid() == 0
    yield shared
    if is_root:
        os.seteuid(0)
    for path in (shared, *shared.glob("*")):
        path.chmod(0o755)
    shutil.rmtree(shared)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_user_may_not_read_is_named(mode: str, sound: Path, nobody: Path) -> None:
    file, bits, words = MODES[mode]
    directory = build("sound", sound, nobody / "model")
    directory.chmod(0o755)
    (directory / file).chmod(bits)
    if os.geteuid() == 0:
        os.seteuid(65534)
    reason = ""
    try:
        load(Settings(model=str(directory), self_check="off", no_ssd=True), lambda _: None)
    except ModelUnusable as unusable:
        reason = str(unusable)
    assert re.search(words, reason) if words else reason == ""
    assert info(directory) == reason


def info(directory: Path) -> str:
    """The reason of `trouper models info`; without config.json nothing can be described."""
    outcome = CliRunner().invoke(cli.main, ["models", "info", str(directory), "--json"])
    if not outcome.stdout:
        assert outcome.exit_code == 2
        return outcome.stderr.strip().removeprefix("trouper: ")
    problem = str(json.loads(outcome.stdout)["problem"])
    assert outcome.exit_code == (2 if problem else 0)
    return problem


def listed(directory: Path) -> str | None:
    """The reason of `trouper models ls`; None where no model is listed."""
    arguments = ["models", "ls", "--json", "--models-from", str(directory.parent)]
    outcome = CliRunner().invoke(cli.main, arguments)
    bodies = json.loads(outcome.stdout) if outcome.stdout.startswith("[") else []
    problems = [body["problem"] for body in bodies if Path(body["directory"]) == directory]
    return problems[0] if problems else None
