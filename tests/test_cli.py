"""The command: flags, errors in one line, signals. The real process where that is what matters."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import pytest
import trio
import trio.testing
from click.testing import CliRunner
from rich.console import Console

from trouper import ModelUnusable, ServerSettings, Settings, SettingsInvalid, cli
from trouper.actors.runtime.served_models import ModelEntry
from trouper.cli import server_process
from trouper.cli.client import Where, client_of
from trouper.cli.commands import serve as serve_command
from trouper.cli.exits import USAGE_ERROR
from trouper.cli.flags import flags_of, models_from, settings_from
from trouper.cli.server_process import snippets
from trouper.protocol.api_keys import Keys
from trouper.protocol.logs import FIELDS
from trouper.protocol.record import Reason, RequestRecord
from trouper.web.observability.request_log import RequestObserver

TROUPER = (sys.executable, "-c", "from trouper.cli import main; main()")
ALL_FIELDS: list[attrs.Attribute[Any]] = [*attrs.fields(Settings), *attrs.fields(ServerSettings)]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def test_every_setting_is_a_flag_with_its_help() -> None:
    command = cli.main.get_command(click.Context(cli.main), "serve")
    assert command is not None
    options = {option.name: option for option in command.params}
    for field in ALL_FIELDS:
        option = options[field.name]
        assert option.opts == [flag(field.name)]
        assert option.help == field.metadata["help"]
        assert option.envvar == f"TROUPER_{field.name.upper()}"


def collected(*arguments: str, **variables: str) -> tuple[Settings, ServerSettings]:
    taken: list[Any] = []

    @click.command()
    @flags_of(Settings)
    @flags_of(ServerSettings)
    def collect(**given: Any) -> None:
        taken.extend((*models_from(given), settings_from(ServerSettings, given)))

    outcome = CliRunner().invoke(collect, arguments, env=variables)
    assert outcome.exit_code == 0, outcome.output
    return taken[0], taken[1]


def test_flags_and_variables_become_settings() -> None:
    arguments = [
        "--kv-bits",
        "4",
        "--no-ssd",
        "--ssd-cache-dir",
        "x",
        "--api-key",
        "a",
        "--api-key",
        "b",
    ]
    settings, server = collected(*arguments, TROUPER_PORT="81", TROUPER_MAX_BATCH_SIZE="3")
    assert (settings.kv_bits, settings.no_ssd, settings.ssd_cache_dir, settings.rows) == (
        4,
        True,
        Path("x"),
        3,
    )
    assert (server.api_key, server.port) == (("a", "b"), 81)
    assert collected(TROUPER_API_KEY="secret") == (Settings(), ServerSettings(api_key=("secret",)))


def test_a_variable_holds_one_key_and_one_name() -> None:
    """Parted at blanks it would be several keys, each easily guessed, and the whole one would open
    nothing."""
    _, server = collected(TROUPER_API_KEY="my secret key", TROUPER_SERVED_MODEL_NAME="My Model")
    assert (server.api_key, server.served_model_name) == (("my secret key",), ("My Model",))
    keys = Keys.of(server)
    assert keys.let_in("Bearer my secret key", None)
    assert not keys.let_in("Bearer my", None)


@pytest.mark.parametrize("variable", ["TROUPER_API_KEY", "TROUPER_API_KEY_FILE"])
@pytest.mark.parametrize("value", ["", " ", '""'])
def test_an_empty_variable_of_keys_is_not_one_that_is_absent(variable: str, value: str) -> None:
    """It would open the server to all, and a client would send no key."""

    @click.command()
    @flags_of(ServerSettings)
    def collect(**flags: Any) -> None:
        Keys.of(settings_from(ServerSettings, flags))

    @click.command()
    @client_of
    def ask(where: Where) -> None:
        assert where.key is None

    for command in (collect, ask):
        outcome = CliRunner().invoke(command, [], env={variable: value})
        assert outcome.exit_code != 0 and not isinstance(outcome.exception, AssertionError)


@pytest.mark.parametrize(
    ("variables", "sent"),
    [
        ({"TROUPER_API_KEY": "my secret key"}, "my secret key"),
        ({"TROUPER_API_KEY": " key\n"}, "key"),
        ({}, None),
    ],
)
def test_a_client_sends_the_key_that_the_server_knows(
    variables: dict[str, str], sent: str | None
) -> None:
    seen: list[Where] = []

    @click.command()
    @client_of
    def collect(where: Where) -> None:
        seen.append(where)

    assert CliRunner().invoke(collect, [], env=variables).exit_code == 0
    assert seen[0].key == sent


def test_a_client_refuses_a_key_that_it_cannot_send() -> None:
    outcome = CliRunner().invoke(cli.main, ["top", "--once", "--api-key", "schlüssel"])
    assert (outcome.exit_code, "--api-key: a key has a character" in outcome.stderr) == (
        USAGE_ERROR,
        True,
    )


def test_version() -> None:
    assert CliRunner().invoke(cli.main, ["--version"]).output.startswith("trouper ")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["--served-model-name", "foo=bar"],
            "--served-model-name foo=bar: 'bar' is none of --model (SmolLM2-135M-Instruct)",
        ),
        (["--port", "70000"], "--port must be between 0 and 65535"),
        (["--host", "0.0.0.0"], "--api-key"),
        (["--host", "[::1]"], "--host [::1]: give the address without brackets, as in --host ::1"),
        (["--host", "127.0.0.1:9000"], "--host '127.0.0.1:9000' is no address: give it alone"),
        (["--host", "http://localhost"], "--host 'http://localhost' is no address: give it alone"),
        (["--host", "unix:/run/trouper"], "and the port by --port"),
        (["--host", ""], "--host '' is no address"),
        (["--kv-bits", "7"], "--kv-bits must be 8, 4 or 0, not 7"),
        (["--model", "/no/such/model", "--port", "0"], "/no/such/model: no such directory"),
        (["--host", "192.0.2.1", "--allow-no-key"], "cannot listen on 192.0.2.1:8000"),
        (
            ["--host", "a..b", "--allow-no-key"],
            "cannot listen on a..b:8000: no host has such a name",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_one_line(
    arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_command, "configure_logging", lambda *_: None)
    outcome = CliRunner().invoke(cli.main, ["serve", *arguments])
    assert (outcome.exit_code, outcome.stdout) == (USAGE_ERROR, "")
    assert problem in outcome.stderr.splitlines()[-1]
    assert "Traceback" not in outcome.stderr


def test_a_taken_port_is_one_line(taken_port: int) -> None:
    refused(
        ["--port", str(taken_port)],
        f"127.0.0.1:{taken_port}: Address already in use; choose another --port",
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "holds no key"),
        (b"\xff\xfe", "is not a text file"),
        ("", "Is a directory"),
    ],
)
async def test_keys_are_read_before_a_model_is_loaded(
    content: bytes | str | None, said: str, tmp_path: Path, stage: Stage
) -> None:
    path = tmp_path if content == "" else tmp_path / "keys"
    if isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(SettingsInvalid, match=f"--api-key-file.*{said}"):
        await server_process.run(
            [Settings()], ServerSettings(port=0, api_key_file=path), Console(quiet=True)
        )
    assert not stage.ready.is_set()


def test_a_variable_that_has_no_effect_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TROUPER_PROT", "81")
    monkeypatch.setattr(serve_command, "configure_logging", lambda *_: None)
    monkeypatch.setattr(serve_command, "_run", lambda *_: None)
    assert CliRunner().invoke(cli.main, ["serve"]).exit_code == 0
    assert (
        "TROUPER_PROT is no variable of trouper and has no effect; TROUPER_PORT is one"
        in caplog.text
    )


def refused(arguments: list[str], said: str) -> None:
    outcome = subprocess.run(
        [*TROUPER, "serve", *arguments], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == USAGE_ERROR
    *log, last = outcome.stderr.splitlines()
    assert said in last
    assert "Traceback" not in outcome.stderr
    assert all(json.loads(line)["level"] == "info" for line in log)
    assert outcome.stdout == ""


@attrs.define
class Stage:
    """Stands for the runtime and the server: writes down what the command does with them."""

    loads: bool = True
    can_be_cancelled: bool = True
    drained: bool = True
    events: list[str] = attrs.field(factory=list)
    ready: trio.Event = attrs.field(factory=trio.Event)
    draining: trio.Event = attrs.field(factory=trio.Event)
    may_finish: trio.Event = attrs.field(factory=trio.Event)

    async def run_models(self, *_: object, task_status: trio.TaskStatus[Any], **__: object) -> None:
        try:
            self.ready.set()
            if not self.loads:
                with trio.CancelScope(shield=not self.can_be_cancelled):
                    await self.may_finish.wait()
            task_status.started(self)
            await self.may_finish.wait()
        finally:
            self.events.append("models ended")

    def entries(self) -> list[ModelEntry]:
        return []

    async def drain(self, timeout_s: float) -> bool:
        self.events.append(f"drain {timeout_s:g}")
        self.draining.set()
        await self.may_finish.wait()
        return self.drained

    async def serve_http(
        self,
        models: object,
        settings: ServerSettings,
        *,
        shutdown: trio.Event,
        observers: Sequence[RequestObserver],
        exchange_observers: object,
        task_status: trio.TaskStatus[Any],
    ) -> None:
        task_status.started(["http://127.0.0.1:1"])
        self._end("stop", observers)
        await shutdown.wait()
        for reason in ("stop", "length", "error", "abort", "refused"):
            self._end(reason, observers)
        self.events.append("server ended")

    def _end(self, reason: Reason, observers: Sequence[RequestObserver]) -> None:
        record = RequestRecord(request_id="1", reason=reason, arrived_at=0, ended_at=1)
        for observer in observers:
            observer(record)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage()
    monkeypatch.setattr(server_process, "run_models", stage.run_models)
    monkeypatch.setattr(server_process, "serve_http", stage.serve_http)
    monkeypatch.setattr(server_process, "announce", lambda *_: stage.events.append("announced"))
    return stage


def start(nursery: trio.Nursery) -> None:
    nursery.start_soon(
        server_process.run,
        [Settings()],
        ServerSettings(port=0, drain_timeout_s=3),
        Console(quiet=True),
    )


async def test_the_first_signal_drains_then_ends_the_server(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trouper")
    async with trio.open_nursery() as nursery:
        start(nursery)
        await trio.testing.wait_all_tasks_blocked()
        os.kill(os.getpid(), signal.SIGTERM)
        await stage.draining.wait()
        assert stage.events == ["announced", "drain 3"], "HTTP still answers while requests finish"
        stage.may_finish.set()
    assert sorted(stage.events[2:]) == ["models ended", "server ended"]
    last = caplog.records[-1]
    line = last.getMessage()
    assert re.match(r"left after \d+\.\d s; requests finished: 2, cut off: 1 ", line)
    assert line.endswith(" (--drain-timeout-s 3); exit code 0")
    fields = getattr(last, FIELDS)
    assert fields.pop("seconds") >= 0
    expected = {"event": "left", "finished": 2, "cut_off": 1, "drain_timeout_s": 3, "exit_code": 0}
    assert fields == expected
    assert last.levelname == "WARNING"


async def test_the_second_signal_ends_at_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []

    def end(number: int) -> None:
        ended.append(number)
        stage.may_finish.set()

    monkeypatch.setattr(server_process, "end_at_once", end)
    async with trio.open_nursery() as nursery:
        start(nursery)
        await trio.testing.wait_all_tasks_blocked()
        os.kill(os.getpid(), signal.SIGTERM)
        await stage.draining.wait()
        os.kill(os.getpid(), signal.SIGINT)
    assert ended == [128 + signal.SIGINT]


async def test_a_signal_while_loading_ends_it(stage: Stage) -> None:
    stage.loads = False
    async with trio.open_nursery() as nursery:
        start(nursery)
        await stage.ready.wait()
        os.kill(os.getpid(), signal.SIGINT)
    assert stage.events == ["models ended"]


async def test_loading_that_does_not_end_is_not_waited_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    """Reading 60 GB of weights took a minute, after the signal."""
    ended: list[int] = []

    def end(number: int) -> None:
        ended.append(number)
        stage.may_finish.set()

    monkeypatch.setattr(server_process, "end_at_once", end)
    stage.loads = stage.can_be_cancelled = False
    async with trio.open_nursery() as nursery:
        start(nursery)
        await stage.ready.wait()
        os.kill(os.getpid(), signal.SIGINT)
    assert ended == [0]


async def test_an_unusable_model_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    async def cannot(*_: object, task_status: trio.TaskStatus[Any], **__: object) -> None:
        await trio.lowlevel.checkpoint()
        raise ModelUnusable("no weights")

    monkeypatch.setattr(server_process, "run_models", cannot)
    with pytest.RaisesGroup(ModelUnusable, flatten_subgroups=True):
        await server_process.run([Settings()], ServerSettings(port=0), Console(quiet=True))


def test_what_is_to_be_pasted_is_one_word_for_a_shell() -> None:
    """zsh looks for files whose names fit the brackets of an IPv6 address, and runs nothing if
    there are none."""
    curl, *python = snippets("http://[::1]:8000", "it's", keyed=False)
    assert '"max_tokens": 512' in curl, "a small model may not stop by itself"
    assert any("max_tokens=512" in line for line in python)
    assert shlex.split(curl)[1] == "http://[::1]:8000/v1/chat/completions"
    assert "curl 'http://[::1]:8000/v1/chat/completions' -H" in curl


ANNOUNCING = """
from types import SimpleNamespace as Some
from trouper.cli.server_process import announce
card = Some(
    architecture="llama",
    dtype="float32",
    batching="batched",
    device="CPU",
    no_generation="",
    pipeline=False,
)
runtime = Some(model=card, tokenizer=Some(tool_parser="hermes"))
announce("http://127.0.0.1:1", Some(entries=lambda: [Some(names=["tiny"], runtime=runtime)]), False)
"""


@pytest.mark.parametrize("redirection", ["", "| :", "| head -1", ">/dev/full", ">&-"])
@pytest.mark.long(but=("*head*", ">&-"))
def test_a_server_goes_on_if_nobody_hears_that_it_is_ready(redirection: str) -> None:
    command = f"set -o pipefail; {shlex.join([sys.executable, '-c', ANNOUNCING])} {redirection}"
    outcome = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (outcome.returncode, outcome.stderr) == (0, "")


def test_each_of_several_models_may_have_a_draft_model() -> None:
    given = {field.name: field.default for field in attrs.fields(Settings)} | {
        "model": ("a", "org/b", "c")
    }

    def drafts(*named: str, model: tuple[str, ...] = ("a", "org/b", "c")) -> list[str | None]:
        return [
            one.draft_model for one in models_from(given | {"model": model, "draft_model": named})
        ]

    assert drafts() == [None, None, None]
    assert drafts("small") == ["small", None, None]
    assert drafts("org/b=small", "x=y") == ["x=y", "small", None]
    assert drafts("c=small", "a=tiny", "c=small") == ["tiny", None, "small"]
    assert drafts("SmolLM2-135M-Instruct=small", model=()) == drafts("small", model=()) == ["small"]
    for wrong in (("small", "a=tiny"), ("",), ("org/b=",)):
        with pytest.raises(SettingsInvalid, match="--draft-model"):
            drafts(*wrong)


def test_several_models_each_have_settings() -> None:
    given = {field.name: field.default for field in attrs.fields(Settings)} | {
        "model": ("a", "b", "a"),
        "seed": 3,
    }
    assert [(one.model, one.seed) for one in models_from(given)] == [("a", 3), ("b", 3)]
    assert [one.model for one in models_from(given | {"model": ()})] == [None]
    with pytest.raises(SettingsInvalid, match="--adapter-path"):
        models_from(given | {"adapter_path": "x"})


def test_several_models_in_a_variable() -> None:
    """Blanks part nothing: a directory's name may have some."""
    seen: list[str | None] = []

    @click.command()
    @flags_of(Settings)
    def collect(**given: Any) -> None:
        seen.extend(one.model for one in models_from(given))

    outcome = CliRunner().invoke(
        collect, [], env={"TROUPER_MODEL": os.pathsep.join(["my model", "owner/name"])}
    )
    assert outcome.exit_code == 0, outcome.output
    assert seen == ["my model", "owner/name"]
