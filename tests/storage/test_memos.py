import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trouper.storage import memos
from trouper.storage.memos import add_to_memo, read_memo


def test_the_oldest_values_go(tmp_path: Path) -> None:
    memo = tmp_path / "memo.json"
    for number in range(5):
        add_to_memo(memo, int, {str(number): number}, keep=3)
    add_to_memo(memo, int, {"3": 9}, keep=3)
    assert [*read_memo(memo, int).items()] == [("2", 2), ("4", 4), ("3", 9)]


def test_writers_at_the_same_moment_keep_each_others_values(tmp_path: Path) -> None:
    """As two ranks of a machine, whose every start checked the model again."""
    memo = tmp_path / "memo.json"
    with ThreadPoolExecutor(8) as writers:
        for number in range(100):
            writers.submit(add_to_memo, memo, int, {str(number): number}, 200)
    assert sorted(read_memo(memo, int).values()) == [*range(100)]


def test_a_lock_that_another_holds_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memos, "LOCK_PATIENCE_S", 0.01)
    memo, held = tmp_path / "memo.json", os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        add_to_memo(memo, int, {"1": 1}, 9)
    finally:
        os.close(held)
    assert read_memo(memo, int) == {"1": 1}


def test_a_file_that_cannot_be_written_only_loses_values() -> None:
    add_to_memo(memo := Path("/proc/nowhere/memo.json"), int, {"1": 1}, 9)
    assert not read_memo(memo, int)
