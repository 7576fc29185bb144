"""Directories that nobody else may change: made, or refused in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.owners import give_away, without_umask
from trouper.protocol.private_files import make_private, owner_or_writers, who_may_change
from trouper.storage.memos import add_to_memo, read_memo


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_what_is_made_is_private_whatever_the_umask_is(tmp_path: Path) -> None:
    with without_umask():
        make_private(tmp_path / "a" / "b")
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700
    assert who_may_change(tmp_path / "a" / "b") == ""


def test_one_that_is_there_is_closed_to_readers(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "file").touch()
    make_private(tmp_path)
    assert mode(tmp_path) == 0o700


def test_one_that_others_wrote_to_is_refused_and_an_empty_one_is_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    make_private(tmp_path)
    assert mode(tmp_path) == 0o700
    tmp_path.chmod(0o1777)
    (tmp_path / "planted").touch()
    with pytest.raises(PermissionError, match="others may write there: remove it") as refused:
        make_private(tmp_path)
    assert (refused.value.filename, mode(tmp_path)) == (str(tmp_path), 0o1777)


def test_somebody_elses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (theirs := tmp_path / "theirs").mkdir(0o700)
    give_away(theirs, monkeypatch)
    said = r"it belongs to the user '?\w+'?: name a directory of your own"
    with pytest.raises(PermissionError, match=said):
        make_private(theirs)


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_private(tmp_path / "file")


def test_a_link_to_a_larger_disk_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (link := tmp_path / "link").symlink_to(tmp_path / "disk")
    make_private(link / "cache")
    assert mode(tmp_path / "disk" / "cache") == 0o700
    assert who_may_change(link / "cache") == ""


def test_whoever_writes_above_may_change_it(tmp_path: Path) -> None:
    make_private(below := tmp_path / "shared" / "mine")
    below.parent.chmod(0o777)
    assert who_may_change(below) == f"{below.parent} may be written by others"
    below.parent.chmod(0o1777)
    assert who_may_change(below) == ""
    assert who_may_change(below.parent) == f"{below.parent} may be written by others"


def test_a_group_of_others_may_change_it(tmp_path: Path) -> None:
    make_private(below := tmp_path / "shared" / "mine")
    below.parent.chmod(0o770)
    assert who_may_change(below) == ""  # The group of the user alone.
    if os.geteuid() == 0:
        os.chown(below.parent, -1, 100)
        assert who_may_change(below) == f"{below.parent} may be written by others"


def test_a_planted_link_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sticky directory anybody may plant a link to a directory of the user's own."""
    make_private(tmp_path / "mine")
    (link := tmp_path / "link").symlink_to("mine")
    give_away(link, monkeypatch)
    assert who_may_change(link).startswith(f"{link} belongs to")


@pytest.mark.parametrize("theirs", ["mine", "."])
def test_what_is_theirs_above_is_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    theirs: str,
) -> None:
    make_private(tmp_path / "mine")
    give_away(tmp_path / theirs, monkeypatch)
    assert "belongs to" in who_may_change(tmp_path / "mine")


def test_what_is_remembered_is_not_read_from_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with without_umask():
        add_to_memo(memo := tmp_path / "new" / "memo.json", int, {"a": 1}, 9)
    assert (mode(memo.parent), mode(memo)) == (0o700, 0o600)
    assert read_memo(memo, int) == {"a": 1}
    memo.chmod(0o666)
    assert (owner_or_writers(memo), read_memo(memo, int)) == ("others may write to it", {})
    memo.chmod(0o600)
    give_away(memo, monkeypatch)
    assert owner_or_writers(memo).startswith("it belongs to") and read_memo(memo, int) == {}
