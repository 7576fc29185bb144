"""Conversations of `trouper chat` that are there the next time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trouper.cli import kept_chats
from trouper.cli.conversation import CommandRefused, Conversation, follow
from trouper.cli.kept_chats import KeptChats


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "trouper"


def begun(system: str = "") -> Conversation:
    """A new session."""
    return Conversation(system, chats=KeptChats.opened())


def say(conversation: Conversation, question: str, answer: str) -> None:
    conversation.ask(question)
    conversation.answered(answer)
    keep(conversation)


def keep(conversation: Conversation) -> None:
    assert isinstance(conversation.chats, KeptChats)
    conversation.chats.keep(conversation)


def files(state: Path) -> list[Path]:
    return sorted((state / "chats").iterdir())


def age(state: Path) -> None:
    """All that is there was written earlier."""
    for path in files(state):
        info = path.stat()
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns - 10**9))


def test_a_conversation_goes_on_in_a_later_session(state: Path) -> None:
    first = begun("Be brief.")
    follow(first, "/set temperature 0")
    say(first, "one?\nor two?", "1")
    age(state)
    say(begun(), "another?", "yes\x1b[2J")

    later = begun()
    newest, oldest = follow(later, "/resume").splitlines()[:2]
    assert newest.startswith(" 1  ") and newest.endswith("  another?")
    assert oldest.startswith(" 2  ") and oldest.endswith("  one? or two?")
    assert follow(later, "/resume 2") == "one?\nor two?\n\n1\n\n2 messages"
    assert later == first
    say(later, "three?", "3")
    assert len(files(state)) == 2, "it goes on in its file"
    assert "\ufffd[2J" in follow(begun(), "/resume 2"), "a model does not clear the screen"


def test_only_the_user_may_read_it(state: Path) -> None:
    say(begun(), "one?", "1")
    [path] = files(state)
    assert [p.stat().st_mode & 0o777 for p in (path, path.parent, state)] == [0o600, 0o700, 0o700]


def test_clear_begins_another_and_what_is_taken_back_is_removed(state: Path) -> None:
    conversation = begun()
    say(conversation, "one?", "1")
    follow(conversation, "/clear")
    keep(conversation)
    say(conversation, "two?", "2")
    assert len(files(state)) == 2
    follow(conversation, "/undo")
    keep(conversation)
    [path] = files(state)
    assert "one?" in path.read_text()


def test_a_loaded_conversation_is_one_of_its_own(state: Path, tmp_path: Path) -> None:
    conversation = begun()
    say(conversation, "one?", "1")
    follow(conversation, f"/save {tmp_path / 'talk'}")
    follow(conversation, f"/load {tmp_path / 'talk'}")
    say(conversation, "two?", "2")
    assert len(files(state)) == 2


def test_the_oldest_go(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_chats, "MAX_KEPT", 2)
    for question in ("one?", "two?", "three?"):
        say(begun(), question, "yes")
        age(state)
    assert sorted(line.split()[-1] for line in follow(begun(), "/resume").splitlines()[:2]) == [
        "three?",
        "two?",
    ]
    assert len(files(state)) == 2


@pytest.mark.parametrize("number", ["0", "2", "x", "-1", "²", "9" * 5000])
def test_a_number_that_is_not_listed_changes_nothing(number: str, state: Path) -> None:
    say(begun(), "one?", "1")
    conversation = begun()
    with pytest.raises(CommandRefused, match="/resume lists them"):
        follow(conversation, f"/resume {number}")
    assert conversation.messages == []


def test_a_damaged_file_is_named_and_the_others_are_there(state: Path) -> None:
    say(begun(), "one?", "1")
    age(state)
    (state / "chats" / "torn.json").write_text("{")
    conversation = begun()
    assert "torn.json holds no conversation" in follow(conversation, "/resume").splitlines()[0]
    with pytest.raises(CommandRefused, match="holds no conversation"):
        follow(conversation, "/resume 1")
    assert follow(conversation, "/resume 2").endswith("2 messages")


def test_a_time_that_no_calendar_has_is_shown() -> None:
    assert kept_chats._shown_time(10**12) == "at an unknown time"


def test_a_file_that_another_session_removes_meanwhile_ends_no_chat(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(begun(), "one?", "1")
    [path], stat = files(state), Path.stat

    def seen_then_removed(seen: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        status = stat(seen, follow_symlinks=follow_symlinks)
        if seen == path:
            path.unlink()
        return status

    conversation = begun()
    monkeypatch.setattr(Path, "stat", seen_then_removed)
    assert "No such file" in follow(conversation, "/resume")


def test_nothing_is_kept_yet_or_at_all() -> None:
    assert follow(begun(), "/resume") == "no earlier conversation is kept"
    with pytest.raises(CommandRefused, match="no conversation is kept"):
        follow(Conversation(), "/resume")
