"""`trouper chat` against a server: one answer, a conversation in a real terminal, what goes
wrong."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import trio
from click.testing import CliRunner, Result

from tests.fakes import EOS, FakeEngine
from tests.families import save
from tests.web.serving import Served, eventually, serving
from trouper import cli
from trouper.cli.client import Where
from trouper.cli.commands import chat
from trouper.cli.conversation import Conversation
from trouper.cli.exits import USAGE_ERROR
from trouper.cli.line_editor import history
from trouper.cli.streamed_answer import AnswerFailed, StreamedAnswer, stream

PATIENCE_S = 60


def where(served: Served, key: str | None = None) -> Where:
    return Where(f"http://127.0.0.1:{served.port}", key)


def says(text: str) -> FakeEngine:
    """A model that answers this, whatever it is asked."""
    tokens = [*text.encode(), EOS]
    return FakeEngine(token_at=lambda _, position: tokens[min(position, len(tokens) - 1)])


async def invoke(*arguments: str, stdin: str | bytes = "", **variables: str) -> Result:
    def run() -> Result:
        return CliRunner().invoke(cli.main, ["chat", *arguments], input=stdin, env=variables)

    return await trio.to_thread.run_sync(run)


async def test_a_question_in_the_command_is_answered_once() -> None:
    async with serving(says("Paris.")) as served:
        outcome = await invoke("--url", f"http://127.0.0.1:{served.port}/v1/", "the", "capital?")
    assert (outcome.exit_code, outcome.stdout) == (0, "Paris.\n")


async def test_a_question_in_stdin_is_answered_and_the_port_is_the_variables() -> None:
    async with serving(says("Paris.")) as served:
        outcome = await invoke(
            stdin="the\ncapital?\n", TROUPER_PORT=str(served.port), TROUPER_HOST="0.0.0.0"
        )
        assert bytes(served.engine.plans_seen[0].admit[0].prompt) == bytes_of(
            "<user>the\ncapital?<assistant>"
        )
    assert (outcome.exit_code, outcome.stdout) == (0, "Paris.\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
async def test_an_answer_that_cannot_be_written_is_one_line() -> None:
    async with serving(says("Paris.")) as served:
        command = [
            sys.executable,
            "-m",
            "trouper",
            "chat",
            "--url",
            f"http://127.0.0.1:{served.port}",
            "hi",
        ]
        with Path("/dev/full").open("wb") as full:  # noqa: ASYNC230 - a device
            outcome = await trio.run_process(command, stdout=full, capture_stderr=True, check=False)
    assert (outcome.returncode, outcome.stderr.splitlines()[1:]) == (
        USAGE_ERROR,
        [b"trouper: the answer cannot be written: No space left on device"],
    )


async def test_what_is_not_utf_8_is_replaced() -> None:
    """In stdin, and in an argument, where Python keeps such a byte as a lone surrogate."""
    async with serving(says("yes")) as served:
        url = ("--url", f"http://127.0.0.1:{served.port}")
        outcome = await invoke(*url, stdin=b"caf\xe9")
        assert (outcome.exit_code, outcome.stdout) == (0, "yes\n")
        outcome = await invoke(*url, "--system", "\udce9", "caf\udce9")
        assert (outcome.exit_code, outcome.stdout) == (0, "yes\n")
        prompts = [bytes(plan.admit[0].prompt) for plan in served.engine.plans_seen if plan.admit]
    assert prompts == [
        bytes_of("<user>caf\ufffd<assistant>"),
        bytes_of("<system>\ufffd<user>caf\ufffd<assistant>"),
    ]


@pytest.mark.parametrize("temperature", ["nan", "inf"])
async def test_a_temperature_that_is_no_number_is_refused(temperature: str) -> None:
    outcome = await invoke("--url", "http://127.0.0.1:9", "--temperature", temperature, "hm?")
    assert (outcome.exit_code, f"{temperature} is no number" in outcome.stderr) == (
        USAGE_ERROR,
        True,
    )


def bytes_of(text: str) -> bytes:
    import numpy as np

    return np.asarray(list(text.encode()), "<i4").tobytes()


async def test_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\nsecret\nother\n")
    async with serving(says("yes"), api_key=("secret",)) as served:
        url = ("--url", f"http://127.0.0.1:{served.port}", "hm?")
        assert (await invoke(*url, "--api-key", "secret")).stdout == "yes\n"
        assert (await invoke(*url, TROUPER_API_KEY_FILE=str(tmp_path / "keys"))).stdout == "yes\n"
        outcome = await invoke(*url)
    assert (outcome.exit_code, "You didn't provide an API key" in outcome.stderr) == (
        USAGE_ERROR,
        True,
    )


@pytest.mark.parametrize("command", [("chat", "hm?"), ("top", "--once"), ("bench",)])
@pytest.mark.parametrize("key", ["ä", "a\nb", "", "\x7f"])
def test_a_key_that_no_header_can_carry_is_refused(
    command: tuple[str, ...], key: str, tmp_path: Path
) -> None:
    url = ("--url", "http://127.0.0.1:9")
    outcome = CliRunner().invoke(cli.main, [*command, *url, "--api-key", key])
    assert outcome.exit_code == USAGE_ERROR
    [said] = outcome.stderr.splitlines()
    assert said.startswith("trouper: --api-key")
    (tmp_path / "keys").write_text("ä\n", "utf-8")
    outcome = CliRunner().invoke(
        cli.main, [*command, *url, "--api-key-file", str(tmp_path / "keys")]
    )
    assert outcome.stderr.startswith(
        f"trouper: --api-key-file {tmp_path}/keys, line 1: a key has a character"
    )


async def test_nobody_there() -> None:
    with trio.socket.socket() as unused:
        await unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        outcome = await invoke("--url", url, "hello?")
    assert outcome.exit_code == USAGE_ERROR
    assert f"no server answers at {url}: start one by `trouper serve`" in outcome.stderr


@pytest.mark.parametrize("command", [("chat", "hm?"), ("top", "--once"), ("connect", "codex")])
@pytest.mark.parametrize("host", ["a..b", ".", f"{'a' * 64}.com"])
def test_a_name_that_no_host_can_have(command: tuple[str, ...], host: str) -> None:
    outcome = CliRunner().invoke(cli.main, [*command, "--url", f"http://{host}:80"])
    assert outcome.exit_code == USAGE_ERROR
    assert outcome.stderr.splitlines()[-1].endswith(f"{host}:80: no host has such a name")


async def test_nothing_was_asked() -> None:
    outcome = await invoke("--url", "http://127.0.0.1:9")
    assert (outcome.exit_code, "there is no question" in outcome.stderr) == (USAGE_ERROR, True)


async def answered(served: Served, conversation: Conversation, echo: Callable[..., None]) -> None:
    def run() -> None:
        with where(served).client() as client:
            chat.answer_to("hello?", client, conversation, echo)

    await trio.to_thread.run_sync(run)


async def test_thinking_is_shown_and_only_the_answer_is_kept() -> None:
    said: list[str] = []
    conversation = Conversation()
    async with serving(says("<think>hm</think>Hello\x1b[2J!")) as served:
        await answered(served, conversation, lambda text, **_: said.append(text))
    assert "\x1b[2mh\x1b[0m" in said
    assert "".join(said).endswith("tokens cached\x1b[0m")
    assert "�[2J!" in "".join(said), "a model does not clear the screen"
    assert conversation.messages[-1]["role"] == "assistant"
    assert conversation.messages[-1]["content"].strip() == "Hello\x1b[2J!"


async def test_stopping_an_answer_ends_it_at_the_server_and_keeps_what_was_said() -> None:
    """Ctrl-C, wherever it lands: here while text is shown, in the terminal below while the next is
    awaited."""
    shown: list[str] = []

    def echo(text: str, **_: Any) -> None:
        shown.append(text)
        if len(shown) == 3:
            raise KeyboardInterrupt

    conversation = Conversation(parameters={"max_tokens": 4000})
    async with serving() as served:
        await answered(served, conversation, echo)
        await eventually(lambda: served.busy == 0)
        await eventually(lambda: served.runtime.health().scheduler.requests_withdrawn == 1)
    assert conversation.messages[-1]["content"].startswith("".join(shown[:2]))
    assert chat.STOPPED in shown[-1]


async def test_a_refused_question_is_taken_back() -> None:
    said: list[str] = []
    conversation = Conversation(parameters={"temperature": -1})
    async with serving() as served:
        await answered(served, conversation, lambda text, **_: said.append(text))
    assert "temperature" in said[-1]
    assert conversation.messages == []


async def test_an_answer_that_breaks_off_is_not_whole() -> None:
    def broken(_: httpx2.Request) -> httpx2.Response:
        event = 'data: {"choices": [{"delta": {"content": "so far"}}]}\n\n'
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, text=event)

    answer = StreamedAnswer()
    with httpx2.Client(transport=httpx2.MockTransport(broken), base_url="http://x") as client:
        pieces = stream(client, {}, answer)
        assert next(pieces).text == "so far"
        with pytest.raises(AnswerFailed, match="in the middle"):
            next(pieces)
    assert answer.text == "so far"


CONTROLLED = """
import fcntl, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
from trouper.cli import main
main()
"""
"""Only a controlling terminal turns Ctrl-C into a signal, and a shell that runs the tests in the
background has them ignore it."""


READING = "\x1b[?2004h"
"""The prompt asks the terminal to mark what is pasted."""


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, arguments: list[str], home: Path) -> None:
        self._master, slave = pty.openpty()
        environment = os.environ | {"XDG_STATE_HOME": str(home), "TERM": "xterm", "HOME": str(home)}
        command = [sys.executable, "-c", CONTROLLED, "chat", *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            cwd=home,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""
        self.everything = ""

    async def until(self, text: str) -> None:
        """And forget what was seen up to there."""
        with trio.fail_after(PATIENCE_S):
            while text not in self.seen:
                data = await trio.to_thread.run_sync(self._read, abandon_on_cancel=True)
                assert data, f"it ended before {text!r}: {self.seen}"
                self.seen += data.decode(errors="replace")
                self.everything += data.decode(errors="replace")
        self.seen = self.seen.split(text, 1)[1]

    def _read(self) -> bytes:
        try:
            data = os.read(self._master, 65536)
        except OSError:
            return b""
        if b"\x1b[6n" in data:  # Where is the cursor? A terminal answers.
            self.type("\x1b[1;1R")
        return data

    async def enter(self, keys: str) -> None:
        """At the prompt, once it is there: before, the terminal itself would eat Ctrl-D."""
        await self.until(READING)
        self.type(keys)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode("utf-8", "surrogateescape"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


async def begin_long_answer(terminal: Terminal, served: Served) -> None:
    await terminal.until("/help lists commands")
    await terminal.enter("/set max_tokens 4000\r")
    await terminal.until("max_tokens = 4000")
    await terminal.enter("tell me\r")
    await eventually(lambda: served.runtime.health().scheduler.tokens_generated > 20)


async def test_a_conversation_in_a_terminal(tmp_path: Path) -> None:
    """Answers stream; Ctrl-C stops one, not the program; the history is there the next time, for
    its owner only."""
    async with serving() as served:
        terminal = Terminal(["--url", f"http://127.0.0.1:{served.port}"], tmp_path)
        try:
            await begin_long_answer(terminal, served)
            terminal.type("\x03")
            await terminal.until(chat.STOPPED)
            await eventually(lambda: served.busy == 0)
            await terminal.enter("/set max_tokens 5\r")
            await terminal.until("max_tokens = 5")
            await terminal.enter("\x1b[A\x1b[A\r")  # Twice up: "tell me" again.
            await terminal.until("5 tokens")
            await terminal.until("length")
            await terminal.enter("half a line\x03")
            await terminal.until("Ctrl-D leaves")
            await terminal.enter("\x04")
            assert await trio.to_thread.run_sync(terminal.process.wait, PATIENCE_S) == 0
            assert served.runtime.health().scheduler.total_requests == 2
        finally:
            terminal.close()
    history = tmp_path / "trouper" / "chat-history"
    assert history.read_text().count("+tell me\n") == 2
    assert history.stat().st_mode & 0o777 == 0o600
    [kept] = (tmp_path / "trouper" / "chats").iterdir()
    questions = [message["content"] for message in json.loads(kept.read_text())["messages"][::2]]
    assert questions == ["tell me", "tell me"]


async def test_nothing_is_kept_with_no_history(tmp_path: Path) -> None:
    async with serving(says("yes")) as served:
        url = f"http://127.0.0.1:{served.port}"
        terminal = Terminal(["--url", url, "--no-history"], tmp_path)
        try:
            await terminal.enter("tell me\r")
            await terminal.until("tokens cached")
            await terminal.enter("/resume\r")
            await terminal.until("no conversation is kept")
            await terminal.enter("\x04")
            assert await trio.to_thread.run_sync(terminal.process.wait, PATIENCE_S) == 0
        finally:
            terminal.close()
    assert not (tmp_path / "trouper").exists()


async def test_an_answer_is_drawn_as_markdown_and_keys_meanwhile_are_for_the_next_question(
    tmp_path: Path,
) -> None:
    async with serving() as served:
        terminal = Terminal(["--url", f"http://127.0.0.1:{served.port}"], tmp_path)
        try:
            await begin_long_answer(terminal, served)
            terminal.everything = ""
            terminal.type("and now")
            terminal.type("\x03")
            await terminal.until(chat.STOPPED)
            # Behind it the next question is drawn, with what was typed.
            answer, _, _ = terminal.everything.partition(chat.STOPPED)
            assert "and now" not in answer
            await terminal.enter("?\r")
            await eventually(lambda: served.runtime.health().scheduler.total_requests == 2)
            terminal.type("\x03")
            await terminal.until(chat.STOPPED)
            prompts = [
                bytes(plan.admit[0].prompt) for plan in served.engine.plans_seen if plan.admit
            ]
            assert prompts[-1].endswith(bytes_of("<user>and now?<assistant>"))
        finally:
            terminal.close()


async def test_markdown_in_a_terminal_and_raw_text_in_a_pipe(tmp_path: Path) -> None:
    async with serving(says("a **bold** word")) as served:
        url = ("--url", f"http://127.0.0.1:{served.port}")
        assert (await invoke(*url, "hm?")).stdout == "a **bold** word\n"
        terminal = Terminal([*url, "hm?"], tmp_path)
        try:
            await terminal.until("\x1b[1mbold\x1b[0m word\r\n")
            assert await trio.to_thread.run_sync(terminal.process.wait, PATIENCE_S) == 0
        finally:
            terminal.close()


async def test_a_name_that_is_not_served_is_refused() -> None:
    """The only model would answer, under a name that does not exist."""
    async with serving(says("yes")) as served:
        outcome = await invoke("--url", f"http://127.0.0.1:{served.port}", "--name", "nope", "hm?")
        assert not served.engine.plans_seen
    assert outcome.exit_code == USAGE_ERROR
    assert "--name nope: the model 'nope' does not exist here; 'fake' is served" in outcome.stderr


async def test_parameters_that_the_server_ignores_are_named() -> None:
    printed: list[str] = []
    conversation = Conversation(parameters={"temprature": 0})
    async with serving(says("yes")) as served:
        await answered(served, conversation, lambda text, **_: printed.append(text))
    assert "ignored by the server: temprature" in printed[-1]


def test_a_server_that_goes_away_is_named_in_plain_words() -> None:
    def break_off(_: httpx2.Request) -> httpx2.Response:
        raise httpx2.RemoteProtocolError("peer closed connection (incomplete chunked read)")

    printed: list[str] = []
    conversation = Conversation()
    with httpx2.Client(transport=httpx2.MockTransport(break_off), base_url="http://x") as client:
        chat.answer_to("hm?", client, conversation, lambda text, **_: printed.append(text))
    assert "the server went away before its answer was complete; /retry asks again" in printed[-1]
    assert conversation.unanswered == "hm?"


async def test_what_a_person_types_ends_no_conversation(tmp_path: Path) -> None:
    """Not UTF-8, no number, no history that could be written."""
    (tmp_path / "trouper").touch()
    async with serving(says("yes")) as served:
        terminal = Terminal(["--url", f"http://127.0.0.1:{served.port}"], tmp_path)
        try:
            await terminal.until(f"questions are not kept: {tmp_path}/trouper: File exists")
            await terminal.enter("/set temperature NaN\r")
            await terminal.until("NaN cannot be sent")
            await terminal.enter("caf\udce9\r")
            await terminal.until("tokens cached")
            await terminal.enter("\x1b[A\r")
            await terminal.until("tokens cached")
            await terminal.enter("/system \udce9\r")
            await terminal.until("\ufffd")
            await terminal.enter("\x04")
            assert await trio.to_thread.run_sync(terminal.process.wait, PATIENCE_S) == 0
            prompts = [
                bytes(plan.admit[0].prompt) for plan in served.engine.plans_seen if plan.admit
            ]
            assert prompts[0] == bytes_of("<user>caf\ufffd<assistant>")
            assert prompts[1].endswith(bytes_of("<user>caf\ufffd<assistant>"))
        finally:
            terminal.close()


def test_a_history_keeps_what_is_not_utf_8_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    kept = history()
    kept.append_string("caf\udce9")
    kept.append_string("two\nlines")
    assert list(history().load_history_strings()) == ["two\nlines", "caf\ufffd"]


OWN = """
import time
from trouper.cli.own_server import serving
with serving("--model", {model!r}, "--log-level", "warning", "--no-ssd") as url:
    print(url, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
@pytest.mark.long(but=("9",))
def test_a_server_of_ones_own_ends_with_its_owner(number: signal.Signals, tmp_path: Path) -> None:
    """As when the terminal is closed, and when nothing of the owner can run any more."""
    script = OWN.format(model=str(save("llama", tmp_path / "tiny")))
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        with Where(url).client() as client:
            assert client.get("/readyz").status_code == 200
            [server] = psutil.Process(owner.pid).children()
            owner.send_signal(number)
            assert owner.wait(PATIENCE_S) == (-number if number == signal.SIGKILL else 128 + number)
            _, left = psutil.wait_procs([server], PATIENCE_S)
            assert left == []
            with pytest.raises(httpx2.ConnectError):
                client.get("/readyz")
    finally:
        owner.kill()
        owner.communicate()


async def test_a_server_of_ones_own_that_cannot_start_is_one_line() -> None:
    done = await trio.run_process(
        [sys.executable, "-m", "trouper", "chat", "--model", "/no/such/model", "hello?"],
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    assert done.returncode == USAGE_ERROR
    assert done.stderr.decode().splitlines() == [
        (
            "trouper: --model /no/such/model: no such directory, and not a hub id (owner/name) "
            "either; `trouper models ls` lists the models that are here"
        ),
        "trouper: the server ended with 2; it said why above",
    ]


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost:1", True),
        ("http://[::1]:1", True),
        ("http://0.0.0.0:1", True),
        ("http://192.0.2.1:1", False),
        ("https://example.org", False),
    ],
)
def test_proxies_are_for_other_machines(url: str, local: bool) -> None:
    assert Where(url).is_local is local
