"""TMPDIR is a directory of the user's own before MLX compiles: it loads what lies there."""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.owners import give_away, without_umask
from trouper.system import temporary_directory
from trouper.system.temporary_directory import FOLDER, PTX, TEMPORARY, keep_private

VARIABLES = ("HOME", "XDG_CACHE_HOME", TEMPORARY, PTX)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory; no other variable is set."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home := tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("trouper.system.temporary_directory.atexit.register", lambda *_: None)
    home.mkdir(0o700)
    return home


def chosen() -> Path:
    keep_private()
    return Path(os.environ[TEMPORARY])


def test_it_lies_below_the_cache_and_nobody_else_may_enter(home: Path) -> None:
    with without_umask():
        own = chosen()
    assert own.is_relative_to(home / ".cache" / "trouper" / "tmp")
    made = [
        path
        for path in (own / FOLDER, *(own / FOLDER).parents)
        if path != home and path.is_relative_to(home)
    ]
    assert {path.stat().st_mode & 0o7777 for path in made} == {0o700}
    assert chosen() == own


def test_a_private_one_stays(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mine := tmp_path / "mine").mkdir(0o755)
    monkeypatch.setenv(TEMPORARY, str(mine))
    with without_umask():
        assert chosen() == mine
    assert (mine / FOLDER).stat().st_mode & 0o7777 == 0o700
    assert not (home / ".cache").exists()


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_one_that_all_may_write_to_is_not_used(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: int,
) -> None:
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(mode)
    monkeypatch.setenv(TEMPORARY, str(shared))
    assert chosen().is_relative_to(home)
    assert not any(shared.iterdir())


def test_mlxs_folder_of_somebody_else_is_not_used(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (mine := tmp_path / "mine").mkdir(0o700)
    (mine / FOLDER).mkdir(0o755)
    monkeypatch.setenv(TEMPORARY, str(mine))
    (mine / FOLDER / "planted").touch()
    (mine / FOLDER).chmod(0o777)
    assert chosen().is_relative_to(home)


@pytest.mark.parametrize("planted", [".cache", ".cache/trouper", ".cache/trouper/tmp"])
def test_where_somebody_else_owns_the_cache_it_is_new_and_the_log_says_so(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    planted: str,
) -> None:
    (home / planted).mkdir(parents=True)
    give_away(home / planted, monkeypatch)
    with caplog.at_level(logging.WARNING, "trouper"):
        new = chosen()
    assert new.parent == tmp_path and new.stat().st_mode & 0o7777 == 0o700
    assert f"{home / planted} belongs to" in caplog.text


def test_where_the_cache_is_a_planted_link_it_is_new(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (theirs := tmp_path / "theirs").mkdir(0o777)
    (home / ".cache").symlink_to(theirs)
    give_away(theirs, monkeypatch)
    assert chosen().parent == tmp_path


def test_where_the_home_takes_no_files_it_is_new(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (home / ".cache").touch()
    with caplog.at_level(logging.WARNING, "trouper"):
        assert chosen().parent == tmp_path
    assert f"{home / '.cache'}" in caplog.text


def test_where_no_directory_takes_files_nothing_is_loaded(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (home / ".cache").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(home / "not there"))
    assert chosen() == Path("/")
    assert "no directory takes temporary files" in caplog.text


def test_mlxs_own_variable_is_kept_where_it_is_private(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(PTX, str(tmp_path / "ptx"))
    keep_private()
    assert os.environ[PTX] == str(tmp_path / "ptx")
    (tmp_path / "ptx" / "planted").touch()
    (tmp_path / "ptx").chmod(0o777)
    keep_private()
    assert PTX not in os.environ
    assert f"{PTX} is not used" in caplog.text and str(tmp_path / "ptx") in caplog.text


def test_kernels_that_a_kill_has_cut_are_removed(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(temporary_directory, "YOUNG_S", -1.0)
    kernels = chosen() / FOLDER / "0.1" / "cpu"
    kernels.mkdir(parents=True)
    (tmp_path / "one.c").write_text("int one(void) { return 1; }")
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-o", kernels / "whole.so", tmp_path / "one.c"], check=True
    )
    whole = (kernels / "whole.so").read_bytes()
    cuts = {"empty": b"", "zeros": bytes(100), "short": whole[:-1], "header": whole[:64]}
    for name, content in cuts.items():
        (kernels / f"{name}.so").write_bytes(content)
    monkeypatch.delenv(TEMPORARY)
    keep_private()
    assert [path.name for path in kernels.iterdir()] == ["whole.so"]
