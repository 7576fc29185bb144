"""Pictures in questions of `trouper chat`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
from click.testing import CliRunner

from tests.fake_images import SeeingEngine, png_file, shown
from tests.fakes import EOS, ints
from tests.web.serving import Served, pace, serving
from trouper import cli
from trouper.cli.attached_images import parted, read_picture, unattached
from trouper.cli.client import Where
from trouper.cli.commands import chat
from trouper.cli.conversation import CommandRefused, Conversation, follow
from trouper.cli.server_checks import ServerChecks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "two words.png", "it's.PNG"):
        (tmp_path / name).write_bytes(png_file(20, 10))
    (tmp_path / "notes.txt").write_text("text")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "text", "names"),
    [
        ("a.png", "", ["a.png"]),
        ("what is a.png ?", "what is  ?", ["a.png"]),
        ("what is in a.png?", "what is in ?", ["a.png"]),
        ("{folder}/a.png and 'two words.png'", "and", ["a.png", "two words.png"]),
        (r"two\ words.png what?", "what?", ["two words.png"]),
        (r"it\'s.PNG", "", ["it's.PNG"]),
        ("file://{folder}/two%20words.png", "", ["two words.png"]),
        ("what is file://[::1/a.png?", None, []),
        ("rename missing.png to notes.txt, don't ask", None, []),
        ("", None, []),
    ],
)
def test_paths_of_pictures_are_found(
    folder: Path, line: str, text: str | None, names: list[str]
) -> None:
    line = line.replace("{folder}", str(folder))
    text_left, paths = parted(line)
    assert (text_left, [path.name for path in paths]) == (line if text is None else text, names)


def test_what_is_no_picture_is_refused(folder: Path) -> None:
    (folder / "no.png").write_bytes(b"text")
    with pytest.raises(CommandRefused, match=r"no\.png: "):
        read_picture(folder / "no.png")


def test_of_pictures_of_which_one_is_refused_none_is_attached(folder: Path) -> None:
    """Else the line, typed again without a mistake, would attach the others once more."""
    (folder / "no.png").write_bytes(b"text")

    def answer(request: httpx2.Request) -> httpx2.Response:
        is_count = request.url.path == "/tokenize"
        return httpx2.Response(200, json={"count": 9} if is_count else {})

    conversation, shown_lines = Conversation(model="a-model"), list[str]()
    with httpx2.Client(transport=httpx2.MockTransport(answer), base_url="http://x") as client:
        with pytest.raises(CommandRefused, match=r"no\.png: "):
            chat.with_pictures(client, conversation, "a.png no.png what?", shown_lines.append)
        assert not conversation.attached
        chat.with_pictures(client, conversation, "a.png what?", shown_lines.append)
    assert len(conversation.attached) == 1


def test_ctrl_c_stops_a_command_and_not_the_conversation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The server may be loading the model of which it is asked."""

    def interrupt(_: httpx2.Request) -> httpx2.Response:
        raise KeyboardInterrupt

    with httpx2.Client(transport=httpx2.MockTransport(interrupt), base_url="http://x") as client:
        conversation = Conversation(checks=ServerChecks(client))
        assert chat._handled(client, conversation, "/model another")
    assert (conversation.model, capsys.readouterr().out.strip()) == (None, "stopped")


def says(text: str) -> SeeingEngine:
    tokens = [*text.encode(), EOS]
    return SeeingEngine(
        before_step=pace, token_at=lambda _, position: tokens[min(position, len(tokens) - 1)]
    )


def prompt_of(served: Served) -> tuple[int, ...]:
    [admit] = [admit for plan in served.engine.plans_seen for admit in plan.admit]
    return ints(admit.prompt)


async def test_a_picture_of_a_command_is_sent(folder: Path) -> None:
    async with serving(says("a square")) as served:
        url = f"http://127.0.0.1:{served.port}"
        run = partial(CliRunner().invoke, cli.main, ["chat", "--url", url, "what?", "a.png"])
        outcome = await trio.to_thread.run_sync(run)
        assert (outcome.exit_code, outcome.stdout) == (0, "a square\n")
        assert prompt_of(served) == (*b"<user>", *shown(20, 10), *b"what?<assistant>")


async def test_a_dropped_picture_waits_for_its_question(folder: Path) -> None:
    lines: list[str] = []

    def use(served: Served) -> None:
        where = Where(f"http://127.0.0.1:{served.port}")
        conversation = Conversation()
        with where.client() as client:
            attach = partial(chat.with_pictures, client, conversation)
            assert attach("'two words.png' ", lines.append) == ("", True)
            assert attach("what is it?", lines.append) == ("what is it?", False)
            assert len(conversation.attached) == 1

    async with serving(says("x")) as served:
        await trio.to_thread.run_sync(use, served)
    assert lines == [f"two words.png: 20 x 10, {len(shown(20, 10))} tokens"]


async def test_what_is_not_attached_is_named(folder: Path) -> None:
    """The question goes on as it is, also in one command."""
    question = "rename a.png to missing.png, as notes.txt says."
    async with serving() as served:
        url = f"http://127.0.0.1:{served.port}"
        flags = ("--url", url, "--max-tokens", "1")
        run = partial(CliRunner().invoke, cli.main, ["chat", *flags, question])
        outcome = await trio.to_thread.run_sync(run)
        assert prompt_of(served) == (*f"<user>{question}<assistant>".encode(),)
    _, missing, text, picture = outcome.stderr.splitlines()
    assert missing == "trouper: missing.png is not attached: there is no such file"
    assert text.startswith("trouper: notes.txt is not attached: pictures end in .png")
    assert 'a text goes along by "$(cat notes.txt)", or by /file' in text
    assert picture == "trouper: the model reads text only: a.png is not attached"


def test_of_what_is_pasted_or_piped_nothing_is_said(folder: Path) -> None:
    assert [*unattached("what is wrong?\nnotes.txt")] == []


def test_a_conversation_with_pictures_is_saved_and_loaded(folder: Path) -> None:
    conversation = Conversation()
    picture = read_picture(folder / "a.png")
    content: list[dict[str, Any]] = [picture.part, {"type": "text", "text": "what?"}]
    conversation.ask(content)
    conversation.answered("a square")
    follow(conversation, "/save talk.json")
    loaded = Conversation()
    assert follow(loaded, "/load talk.json") == "2 messages"
    assert loaded.messages == conversation.messages
    assert follow(loaded, "/undo") == "taken back: [picture] what?"
    saved = (folder / "talk.json").read_text().replace("image_url", "video")
    (folder / "talk.json").write_text(saved)
    with pytest.raises(CommandRefused, match="a part of a message"):
        follow(loaded, "/load talk.json")
