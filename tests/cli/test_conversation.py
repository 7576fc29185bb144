"""What `trouper chat` keeps, and its commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from trouper.cli.attached_images import content_of
from trouper.cli.conversation import (
    COMMANDS,
    AskAgain,
    CommandRefused,
    Conversation,
    EndOfChat,
    follow,
    question_in,
)


@pytest.fixture
def talked() -> Conversation:
    conversation = Conversation("Be brief.")
    for question, answer in (("one?", "1"), ("two?", "2")):
        conversation.ask(question)
        conversation.answered(answer)
    return conversation


def test_the_whole_conversation_is_sent(talked: Conversation) -> None:
    talked.ask("three?")
    assert talked.body() == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one?"},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "two?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "three?"},
        ]
    }


def test_a_question_without_an_answer_is_taken_back(talked: Conversation) -> None:
    """Else the next request would hold two questions in a row, which templates refuse."""
    before = talked.body()
    talked.ask("three?")
    talked.answered("")
    assert talked.body() == before


def test_retry_asks_what_was_left_without_an_answer(talked: Conversation) -> None:
    """The question that failed, not the one before it, whose answer stays."""
    talked.ask("three?")
    talked.answered("")
    with pytest.raises(AskAgain) as again:
        follow(talked, "/retry")
    assert again.value.question == "three?"
    assert talked.messages[-1] == {"role": "assistant", "content": "2"}
    talked.ask("three?")
    talked.answered("3")
    assert follow(talked, "/undo") == "taken back: three?"
    assert follow(talked, "/undo") == "taken back: two?"


@pytest.mark.parametrize("command", ["/clear", "/undo", "/load {tmp}/talk"])
def test_a_question_without_an_answer_is_forgotten_with_the_rest(
    talked: Conversation, command: str, tmp_path: Path
) -> None:
    follow(talked, f"/save {tmp_path}/talk")
    talked.ask("three?")
    talked.answered("")
    said = follow(talked, command.replace("{tmp}", str(tmp_path)))
    assert command != "/undo" or said == "taken back: three?"
    with pytest.raises((AskAgain, CommandRefused)) as again:
        follow(talked, "/retry")
    assert "three?" not in str(again.value)


def test_parameters_and_the_model(talked: Conversation) -> None:
    assert follow(talked, "/set") == "all defaults"
    follow(talked, "/set temperature 0.5")
    assert follow(talked, "/set stop END") == 'temperature = 0.5, stop = "END"'
    follow(talked, "/set stop -")
    assert follow(talked, "/model") == "the server's default"
    assert follow(talked, "/model other") == "other"
    body = talked.body()
    assert (body["temperature"], body["model"], "stop" in body) == (0.5, "other", False)
    assert follow(talked, "/model -") == "the server's default"
    assert "model" not in talked.body()
    assert follow(talked, "/set n 1") == "temperature = 0.5, n = 1"
    assert follow(talked, "/set\tn -") == "temperature = 0.5"
    with pytest.raises(CommandRefused, match="give a value"):
        follow(talked, "/set temperature")


def test_the_system_prompt(talked: Conversation) -> None:
    assert follow(talked, "/system") == "Be brief."
    follow(talked, "/system Be long, and nice.")
    assert talked.body()["messages"][0] == {"role": "system", "content": "Be long, and nice."}
    assert follow(talked, "/system -") == "no system prompt"
    assert talked.body()["messages"][0]["role"] == "user"


def test_clear_retry_and_undo(talked: Conversation) -> None:
    with pytest.raises(AskAgain) as again:
        follow(talked, "/retry")
    assert again.value.question == "two?"
    assert [message["content"] for message in talked.messages] == ["one?", "1"]
    assert follow(talked, "/undo") == "taken back: one?"
    with pytest.raises(CommandRefused, match="nothing was asked"):
        follow(talked, "/undo")
    talked.ask("four?")
    follow(talked, "/clear")
    assert (talked.messages, talked.system) == ([], "Be brief.")


def test_what_is_saved_is_loaded(talked: Conversation, tmp_path: Path) -> None:
    talked.parameters["temperature"] = 0
    talked.ask("ünïcode?")
    talked.answered("\n")
    path = tmp_path / "talk.json"
    assert follow(talked, f"/save {path}") == f"6 messages are in {path}"
    other = Conversation(model="kept")
    assert follow(other, f"/load {path}") == "6 messages"
    talked.model = "kept"
    assert other == talked


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/nothing", "there is no /nothing; /help"),
        ("/show info", "there is no /show; /model, /system and /set show"),
        ("/save", "name a file"),
        ("/save /none/x.json", "/none/x.json: No such file or directory"),
        ("/load /none", "/none: No such file or directory; /model takes another model"),
        ("/load {tmp}/wrong", "holds no conversation"),
        ("/set temperature NaN", "temperature: NaN cannot be sent as JSON"),
        ("/set temperature 1e999", "temperature: Infinity cannot be sent"),
        ('/set logit_bias {"1": -Infinity}', "cannot be sent"),
        ('/set stop "\\ud800"', "cannot be sent"),
        ("/set messages []", "/system, /undo and /clear"),
        ("/set stream false", "always streamed"),
        ("/set stream_options -", "always streamed"),
        ("/set model other", "/model NAME"),
        ("/set n 2", "one answer"),
        ("/set n 1.5", "one answer"),
        ("/load {tmp}/nan", "{tmp}/nan: temperature: NaN cannot be sent"),
        ("/load {tmp}/stream", "{tmp}/stream: answers are always streamed"),
        ("/load {tmp}/surrogate", "not Unicode's"),
        ("/save ~nobody-here/x", "~nobody-here/x: "),
        ("/save /none\0/x", "No such file"),
        ("/load {tmp}/role", "role is one of system, developer, user, assistant, not 'bot'"),
    ],
)
def test_what_cannot_be_followed_says_why_and_changes_nothing(
    talked: Conversation, line: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "wrong").write_text('{"messages": [{"role": "user"}]}')
    (tmp_path / "nan").write_text('{"messages": [], "parameters": {"temperature": NaN}}')
    (tmp_path / "stream").write_text('{"messages": [], "parameters": {"stream": false}}')
    (tmp_path / "surrogate").write_text('{"messages": [{"role": "user", "content": "\\ud800"}]}')
    (tmp_path / "role").write_text('{"messages": [{"role": "bot", "content": "hello"}]}')
    before = talked.body()
    with pytest.raises(CommandRefused) as refused:
        follow(talked, line.replace("{tmp}", str(tmp_path)))
    assert said.replace("{tmp}", str(tmp_path)) in str(refused.value)
    assert talked.body() == before


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("/usr/bin is what?", "/usr/bin is what?"),
        ("/etc/ and /usr", "/etc/ and /usr"),
        ("//help me", "/help me"),
        ("// begins a comment", "/ begins a comment"),
        ("what is /help?", "what is /help?"),
        ("/help", None),
        ("/hepl me", None),
        ("/set stop /", None),
        ("/", None),
    ],
)
def test_a_slash_may_begin_a_question(line: str, asked: str | None) -> None:
    assert question_in(line) == asked


@pytest.mark.parametrize(("asks", "leaves"), [("/help", "/quit"), ("/?", "/bye")])
def test_help_lists_every_command_and_quit_leaves(
    talked: Conversation, asks: str, leaves: str
) -> None:
    """Also by ollama's words."""
    said = follow(talked, asks).splitlines()
    assert [line.split()[0] for line in said[: len(COMMANDS)]] == list(COMMANDS)
    assert any("//" in line for line in said)
    with pytest.raises(EndOfChat):
        follow(talked, leaves)


def test_a_text_file_goes_before_the_next_question(tmp_path: Path) -> None:
    conversation = Conversation()
    notes = tmp_path / "notes.txt"
    notes.write_text("The mill is old.")
    assert follow(conversation, f"/file {notes}") == (
        "notes.txt: 16 characters, for the next question"
    )
    conversation.ask(content_of("What is old?", conversation.attached))
    [message] = conversation.body()["messages"]
    texts = [part["text"] for part in message["content"]]
    assert texts == ["notes.txt:\n```\nThe mill is old.\n```\n", "What is old?"]


def test_a_long_file_is_not_shown_again_when_it_is_taken_back(tmp_path: Path) -> None:
    conversation = Conversation()
    (tmp_path / "long.txt").write_text("x" * 1000)
    follow(conversation, f"/file {tmp_path / 'long.txt'}")
    conversation.ask(content_of("Why?", conversation.attached))
    assert follow(conversation, "/undo") == "taken back: [1,019 characters] Why?"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "is no text"),
        (b"x" * (2**20 + 1), "larger than 1 MiB"),
    ],
    ids=("absent", "binary", "large"),
)
def test_a_file_that_cannot_be_put_there_is_refused(
    content: bytes | None, reason: str, tmp_path: Path
) -> None:
    path, conversation = tmp_path / "file", Conversation()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CommandRefused, match=reason):
        follow(conversation, f"/file {path}")
    assert not conversation.attached
