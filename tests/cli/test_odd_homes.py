"""A home that belongs to somebody else, or that nobody has, names that no file can have, a full
disk, a proxy: one line each, and no traceback."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner, Result

from tests.cli.agent_homes import SERVED
from trouper import SettingsInvalid, cli
from trouper.cli.agents.coding_agents import CODING_AGENTS
from trouper.cli.commands import serve as serve_command
from trouper.cli.exits import USAGE_ERROR
from trouper.cli.line_editor import history
from trouper.engine.loading import (
    bundled_model,
    gguf,
    lora_adapter,
    model_fingerprint,
    model_source,
)
from trouper.protocol.problems import ModelUnusable
from trouper.web.serving.state_database import StateDatabase

LONG = "a" * 300
"""No file can have such a name."""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom the system does not know, as in a container that runs as any number."""

    def unknown(_: object) -> None:
        raise KeyError("no such user")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home that may not be looked into, as another user's after `sudo -u`; also for root, for
    whom rights are no bound."""
    locked, stat = tmp_path / "locked", os.stat

    def refusing(path: object, *rest: object, **more: object) -> os.stat_result:
        if not isinstance(path, int) and Path(os.fsdecode(path)).is_relative_to(f"{locked}/"):  # type: ignore[arg-type]
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *rest, **more)  # type: ignore[arg-type]

    (locked / ".config" / "trouper").mkdir(parents=True)
    (locked / ".config" / "trouper" / "config.toml").write_text("port = 81")
    (locked / ".cache").mkdir()
    monkeypatch.setenv("HOME", str(locked / "home"))
    monkeypatch.setattr(os, "stat", refusing)
    return locked


def call(*arguments: str, **variables: str) -> Result:
    outcome = CliRunner().invoke(cli.main, arguments, env=variables, prog_name="trouper")
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.exception
    return outcome


def test_a_settings_file_that_may_not_be_looked_at_does_not_count_and_a_line_says_so(
    locked: Path,
) -> None:
    outcome = call("serve", "--print-config")
    assert (outcome.exit_code, "# port = 8000" in outcome.stdout) == (0, True)
    path = locked / "home" / ".config" / "trouper" / "config.toml"
    assert outcome.stderr == f"trouper: {path} does not count: Permission denied\n"


def test_a_user_without_a_home_reads_no_file_of_his_own(homeless: None) -> None:
    outcome = call("serve", "--print-config")
    assert (outcome.exit_code, outcome.stderr, "Now: none." in outcome.stdout) == (0, "", True)


def test_a_user_without_a_home_is_told_what_to_set(
    homeless: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_command, "configure_logging", lambda *_: None)
    for arguments in (["serve", "--port", "0"], ["cache", "ls"]):
        outcome = call(*arguments)
        assert outcome.exit_code == USAGE_ERROR
        assert outcome.stderr.startswith("trouper: this user has no home directory: set HOME")
    there = tmp_path / "there"
    assert (
        call("cache", "ls", XDG_CACHE_HOME=str(there)).stdout
        == f"nothing is cached in {there}/trouper/blocks\n"
    )
    for agent in (agent for agent in CODING_AGENTS if not agent.why_no_write):
        with pytest.raises(SettingsInvalid, match="set HOME"):
            agent.setup(SERVED)


def test_a_user_without_a_home_has_a_history_of_this_session(
    homeless: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(history().load_history_strings()) == []
    assert "questions are not kept: this user has no home directory" in capsys.readouterr().out


@pytest.mark.parametrize("name", [LONG, "~nobody-of-this-name/models"])
def test_a_directory_of_models_that_cannot_be(name: str) -> None:
    outcome = call("serve", "--print-config", "--models-from", name)
    assert outcome.exit_code == USAGE_ERROR
    assert (
        outcome.stderr == f"trouper: --models-from {name} is no directory; give one, or hub-cache\n"
    )
    assert call("models", "ls", "--models-from", name).stderr == outcome.stderr
    with pytest.raises(ModelUnusable, match="no such directory, and not a hub id"):
        model_source.source_of(name)
    with pytest.raises(ModelUnusable, match="no such directory"):
        lora_adapter.require(name)


def test_a_model_whose_name_is_too_long_is_not_there(tmp_path: Path) -> None:
    (tmp_path / ".cache" / "huggingface" / "hub").mkdir(parents=True)
    assert "`trouper models ls` lists what is" in call("models", "rm", LONG).stderr
    out = f"{LONG}/certificate"
    assert "there is no directory" in call("certify", "--out", out).stderr
    assert "there is no directory" in call("bench", "--out", out).stderr


def test_a_home_directory_is_meant_whatever_names_it(tmp_path: Path) -> None:
    """A shell expands `--flag ~/x`, but not `--flag=~/x`, and nobody expands a variable of a unit
    or a container."""
    for outcome in (
        call("serve", "--print-config", "--ssd-cache-dir=~/blocks"),
        call("serve", "--print-config", TROUPER_SSD_CACHE_DIR="~/blocks"),
    ):
        assert f'ssd-cache-dir = "{tmp_path}/blocks"' in outcome.stdout
    outcome = call("serve", "--print-config", "--ssd-cache-dir=~nobody-of-this-name/x")
    assert outcome.exit_code == USAGE_ERROR
    assert outcome.stderr == (
        "trouper: --ssd-cache-dir: no home directory is known for ~nobody-of-this-name; write the "
        "path out\n"
    )


def test_an_embedded_model_whose_cache_may_not_be_looked_at_has_a_remedy(
    locked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # Root may.
    monkeypatch.setattr(bundled_model, "PACKAGE", "no_such_package")
    assert not bundled_model.is_here()
    with pytest.raises(ModelUnusable, match="set XDG_CACHE_HOME"):
        bundled_model.require_cache()


def test_an_embedded_model_for_which_the_disk_has_no_room_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("[write] Unable to write 422782 bytes to file.")

    monkeypatch.setattr(bundled_model, "_installed", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(gguf, "convert", full)
    with pytest.raises(
        ModelUnusable,
        match="Unable to write 422782 bytes to file; set XDG_CACHE_HOME to a directory",
    ):
        bundled_model.directory(tmp_path)


async def test_a_directory_of_batches_that_may_not_be_looked_at_is_not_there(locked: Path) -> None:
    assert await StateDatabase(locked / "batches").open(create=False) is False


def test_blocks_are_kept_where_the_home_takes_no_files(tmp_path: Path) -> None:
    """The memo of digests is lost with it, and nothing else: --ssd-cache-dir may be on another
    disk."""
    (tmp_path / ".cache").write_text("a file in the place of the directory")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    told: list[str] = []
    found = model_fingerprint.fingerprint(
        tmp_path / "model", None, told.append, lambda *_: None, {}
    )
    assert (bool(found), told) == (True, [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--print-config"],
        ["models", "ls"],
        ["completion", "fish"],
        ["--help"],
        ["cache", "stats"],
    ],
)
@pytest.mark.long(but=("arguments0", "arguments3"))
def test_what_cannot_be_written_is_one_line(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "trouper", *arguments]
    with Path("/dev/full").open("wb") as full:
        outcome = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert outcome.stderr == "trouper: the output cannot be written: No space left on device\n"
    assert outcome.returncode == USAGE_ERROR


def test_another_error_of_the_system_is_not_taken_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise OSError(28, "No space left on device", "a file of the runtime")

    monkeypatch.setattr(serve_command, "_run", failing)
    monkeypatch.setattr(serve_command, "configure_logging", lambda *_: None)
    with pytest.raises(OSError, match="a file of the runtime"):
        CliRunner().invoke(cli.main, ["serve"], catch_exceptions=False)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@pytest.mark.long(but=("ascii",))
def test_a_name_that_cannot_be_written_is_escaped(encoding: str, tmp_path: Path) -> None:
    """Of a disk of before UTF-8, or in a terminal that has none: the table ended in a traceback."""
    (tmp_path / "shelf" / os.fsdecode(b"M\xfcller")).mkdir(parents=True)
    (tmp_path / "shelf" / os.fsdecode(b"M\xfcller") / "config.json").write_text("{}")
    outcome = subprocess.run(
        [sys.executable, "-m", "trouper", "models", "ls", "--models-from", "shelf"],
        env=os.environ | {"PYTHONIOENCODING": encoding, "TROUPER_PORT": "9"},
        capture_output=True,
        check=False,
    )
    assert (outcome.returncode, outcome.stderr) == (0, b"")
    assert b"M\\udcfcller" in outcome.stdout and b"unusable" in outcome.stdout


@pytest.mark.parametrize(("value", "coloured"), [("1", False), ("", True)])
def test_no_color_is_heeded(value: str, coloured: bool) -> None:
    """Empty, it does not count: https://no-color.org."""
    outcome = CliRunner().invoke(
        cli.main,
        ["top", "--once", "--url", "http://127.0.0.1:9"],
        color=True,
        env={"NO_COLOR": value},
    )
    assert ("\x1b[31m" in outcome.stderr) == coloured
    assert "no server answers" in outcome.stderr


@pytest.mark.parametrize(
    "command", [["chat", "hi"], ["top", "--once"], ["connect", "claude"], ["bench", "--out", "x"]]
)
def test_a_proxy_that_cannot_be_used_is_one_line(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_socks(*_: object, **__: object) -> None:
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed.")

    monkeypatch.setattr(httpx2.Client, "__init__", without_socks)
    outcome = call(*command, "--url", "http://192.0.2.1:9")
    assert outcome.exit_code == USAGE_ERROR
    assert outcome.stderr == (
        "trouper: asking http://192.0.2.1:9 without a key\n"
        "trouper: http://192.0.2.1:9: the proxy of the environment (ALL_PROXY, HTTPS_PROXY, "
        "HTTP_PROXY) cannot be used: "
        "Using SOCKS proxy, but the 'socksio' package is not installed; unset it, or name the host "
        "in NO_PROXY\n"
    )


def test_a_url_without_a_scheme_is_refused_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = call("top", "--once", "--url", "localhost:8000")
    assert outcome.exit_code == USAGE_ERROR
    assert outcome.stderr == (
        "trouper: --url localhost:8000: begin it with http:// or https://, as in "
        "http://127.0.0.1:8000\n"
    )


@pytest.mark.parametrize("url", ["http://", "https:///v1", "http://:8000"])
def test_a_url_without_a_host_is_refused(url: str) -> None:
    outcome = call("top", "--once", "--url", url)
    assert (outcome.exit_code, outcome.stderr) == (
        USAGE_ERROR,
        f"trouper: --url {url}: it names no host, as http://127.0.0.1:8000 does\n",
    )


@pytest.mark.parametrize(
    "command", [["chat", "hi"], ["top", "--once"], ["connect", "claude"], ["bench", "--out", "x"]]
)
def test_a_port_that_is_none_is_told_as_serve_tells_it(command: list[str]) -> None:
    """No server can listen there; until now none answered there."""
    none = "must be between 0 and 65535, not 99999"
    for arguments, variables, told in (
        (["--port", "99999"], {}, f"--port {none}"),
        ([], {"TROUPER_PORT": "99999"}, f"--port {none} (from TROUPER_PORT)"),
        (
            ["--url", "http://localhost:99999/v1"],
            {},
            "--url http://localhost:99999/v1: its port is no number from 0 to 65535",
        ),
        (
            ["--url", "http://localhost:http"],
            {},
            "--url http://localhost:http: its port is no number from 0 to 65535",
        ),
    ):
        outcome = call(*command, *arguments, **variables)
        assert (outcome.exit_code, outcome.stderr) == (USAGE_ERROR, f"trouper: {told}\n")


@pytest.mark.parametrize("flag", ["--write", "--dry-run", "--run"])
def test_a_client_to_be_set_up_must_be_named(flag: str) -> None:
    outcome = call("connect", flag)
    assert outcome.exit_code == USAGE_ERROR
    assert (
        outcome.stderr
        == f"trouper: {flag} is for one client: name it, as in `trouper connect claude {flag}`\n"
    )
