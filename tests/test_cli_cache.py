"""`trouper cache`: what is there, is it sound, away with it - and nobody else's files are
touched."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from tests.storage.making import (
    NAMESPACE,
    OTHER_NAMESPACE,
    ROOT,
    all_runs,
    chain,
    path_of,
    put,
    write_run,
)
from trouper import cli
from trouper.cli.exits import DAMAGE_FOUND, USAGE_ERROR
from trouper.storage import cache_directory, cache_inspection
from trouper.storage.runs import RunStore
from trouper.storage.stored_blocks import RunInfo


@pytest.fixture
def stored(tmp_path: Path) -> tuple[RunStore, list[RunInfo]]:
    """Two runs of one model, one of another that was last used three days ago."""
    directory = tmp_path / "cache"
    cache_directory.prepare(directory)
    other = RunStore(directory, OTHER_NAMESPACE)
    old = path_of(other, write_run(other, ROOT, chain(2, seed=9)))
    os.utime(old, (0, old.stat().st_mtime - 3 * 86400))
    store = RunStore(directory, NAMESPACE)
    return store, [put(store, seed=seed)[0] for seed in range(2)]


def call(store: RunStore, *arguments: str, answer: str = "") -> Result:
    command = ["cache", *arguments, "--ssd-cache-dir", str(store.directory)]
    return CliRunner().invoke(cli.main, command, input=answer)


def test_ls_shows_the_last_used_first(stored: tuple[RunStore, list[RunInfo]]) -> None:
    store, runs = stored
    head, first, second = call(store, "ls").output.splitlines()
    assert head.split() == ["namespace", "files", "size", "blocks", "tokens", "used"]
    size = f"{sum(run.file_bytes for run in runs) / 1000:.1f}"
    assert first.split()[:6] == [NAMESPACE[:32], "2", size, "kB", "6", "24"]
    assert second.split()[0] == OTHER_NAMESPACE[:32]
    assert second.endswith(" 3 days")


def test_stats_is_the_sum(stored: tuple[RunStore, list[RunInfo]]) -> None:
    store, runs = stored
    path_of(store, runs[0]).write_bytes(b"torn")
    output = call(store, "stats").output
    for said in (
        "in 3 files",
        "5 (20 tokens)",
        "snapshots   2",
        "unreadable  1 files",
        "to 3 days ago",
        "free disk",
    ):
        assert said in output


@pytest.mark.parametrize("command", ["stats", "verify"])
def test_a_reader_that_leaves_is_no_fault_of_the_directory(
    command: str, stored: tuple[RunStore, list[RunInfo]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `trouper cache stats | head -1`."""

    def leave(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(click, "echo", leave)
    outcome = call(stored[0], command)
    assert (outcome.exit_code, outcome.stderr) == (1, "")


def test_verify_says_what_is_damaged_and_removes_it_if_told_to(
    stored: tuple[RunStore, list[RunInfo]],
) -> None:
    store, runs = stored
    assert call(store, "verify").exit_code == 0
    path = path_of(store, runs[1])
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    for arguments in (("verify",), ("verify", "--remove")):
        assert path.exists()
        outcome = call(store, *arguments)
        assert outcome.exit_code == DAMAGE_FOUND
        assert f"{path}: checksum: snapshot 1" in outcome.output
        assert "1 damaged" in outcome.output
    assert not path.exists()
    outcome = call(store, "verify")
    assert (outcome.exit_code, outcome.output.splitlines()[-1].split(": ")[1]) == (
        0,
        "none damaged",
    )


def test_a_run_in_another_models_directory_is_damaged(
    stored: tuple[RunStore, list[RunInfo]],
) -> None:
    store, runs = stored
    path_of(store, runs[0]).rename(store.directory / OTHER_NAMESPACE[:32] / runs[0].name)
    outcome = call(store, "verify")
    assert (outcome.exit_code, "foreign: of another namespace" in outcome.output) == (
        DAMAGE_FOUND,
        True,
    )


def test_what_vanishes_or_cannot_be_read_meanwhile(stored: tuple[RunStore, list[RunInfo]]) -> None:
    store, runs = stored
    files = cache_inspection.runs(store.directory)
    path_of(store, runs[0]).unlink()
    path_of(store, runs[1]).unlink()
    path_of(store, runs[1]).symlink_to("nowhere")
    problems = {
        checked.path: checked.problem for checked in cache_inspection.verify(files, remove=True)
    }
    assert problems[path_of(store, runs[0])] is None
    assert "unreadable" in str(problems[path_of(store, runs[1])])
    assert path_of(store, runs[1]).is_symlink()


def test_clear_asks_first(stored: tuple[RunStore, list[RunInfo]]) -> None:
    store, runs = stored
    outcome = call(store, "clear", answer="n\n")
    assert outcome.exit_code == 1
    assert "Remove 3 files" in outcome.output
    assert len(all_runs(store)) == len(runs)
    assert "removed 3 files" in call(store, "clear", answer="y\n").output
    assert all_runs(store) == []


def test_clear_leaves_what_is_not_ours(stored: tuple[RunStore, list[RunInfo]]) -> None:
    store, _ = stored
    (store.path / "left.tmp").touch()
    (store.directory / "notes.txt").touch()
    theirs = store.directory / OTHER_NAMESPACE[:32] / "notes.txt"
    theirs.touch()
    assert "removed 4 files" in call(store, "clear", "--yes").output
    left = sorted(path.name for path in store.directory.iterdir())
    assert left == sorted(
        [cache_directory.TAG, cache_directory.USAGE, "notes.txt", OTHER_NAMESPACE[:32]]
    )
    assert theirs.exists()
    put(store)  # A server that was running goes on.


def test_verify_of_a_directory_that_is_not_there_finds_nothing_sound(tmp_path: Path) -> None:
    """Exit code 0 would hide a misspelt name. Where none is named, a server has perhaps kept
    nothing yet."""
    outcome = call(RunStore(tmp_path / "none", NAMESPACE), "verify")
    assert outcome.exit_code == USAGE_ERROR
    assert (
        f"there is no directory {tmp_path / 'none'}" in outcome.output
        and "--ssd-cache-dir" in outcome.output
    )
    unnamed = CliRunner().invoke(
        cli.main, ["cache", "verify"], env={"XDG_CACHE_HOME": str(tmp_path)}
    )
    assert (unnamed.exit_code, unnamed.output) == (0, "0 files, 0 bytes: none damaged\n")


@pytest.mark.parametrize("command", [("ls",), ("stats",), ("clear", "--yes")])
def test_a_directory_that_is_not_there_holds_nothing(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    outcome = call(RunStore(tmp_path / "none", NAMESPACE), *command)
    assert outcome.exit_code == 0
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "command", [("ls",), ("stats",), ("verify", "--remove"), ("clear", "--yes")]
)
def test_somebody_elses_directory_is_left_alone(command: tuple[str, ...], tmp_path: Path) -> None:
    theirs = tmp_path / NAMESPACE[:32] / "model.safetensors"
    theirs.parent.mkdir()
    theirs.touch()
    outcome = call(RunStore(tmp_path, NAMESPACE), *command)
    assert outcome.exit_code == USAGE_ERROR
    assert "was not made by trouper" in outcome.output
    assert theirs.exists()


def test_the_directory_is_the_one_of_serve(
    stored: tuple[RunStore, list[RunInfo]], tmp_path: Path
) -> None:
    store, _ = stored
    home = tmp_path / "home" / "trouper"
    home.mkdir(parents=True)
    store.directory.rename(home / "blocks")
    outcome = CliRunner().invoke(
        cli.main, ["cache", "ls"], env={"XDG_CACHE_HOME": str(home.parent)}
    )
    assert NAMESPACE[:32] in outcome.output
    variable = {"TROUPER_SSD_CACHE_DIR": str(home / "blocks")}
    assert CliRunner().invoke(cli.main, ["cache", "ls"], env=variable).output == outcome.output
