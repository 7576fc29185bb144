"""One verdict and one reason: `serve`, `models info`, `models ls` and `doctor` on directories that
are broken, odd or of another format."""

from __future__ import annotations

import json
import re
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
    assert listed(directory) in (reason, None)


def info(directory: Path) -> str:
    """The reason of `trouper models info`; without config.json nothing can be described."""
    outcome = CliRunner().invoke(cli.main, ["models", "info", str(directory), "--json"])
    if outcome.exit_code:
        return outcome.stderr.strip().removeprefix("trouper: ")
    return str(json.loads(outcome.stdout)["problem"])


def listed(directory: Path) -> str | None:
    """The reason of `trouper models ls`; None where no model is listed."""
    arguments = ["models", "ls", "--json", "--models-from", str(directory.parent)]
    outcome = CliRunner().invoke(cli.main, arguments)
    bodies = json.loads(outcome.stdout) if outcome.stdout.startswith("[") else []
    problems = [body["problem"] for body in bodies if Path(body["directory"]) == directory]
    return problems[0] if problems else None
