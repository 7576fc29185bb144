"""The cache directory: private, measured, free of orphans, and nobody else's files touched."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from trouper.storage import cache_directory as disk

DAY_S = 86400.0


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "deep" / "blocks"
    disk.prepare(path)
    return path


def put(path: Path, *, age_s: float = 0, size: int = 10) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x" * size)
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def test_only_its_owner_reads_it(cache: Path) -> None:
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    cache.chmod(0o755)
    disk.prepare(cache)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_an_empty_directory_measures_nothing(cache: Path) -> None:
    measured = disk.sweep(cache, DAY_S)
    assert (measured.files, measured.bytes, measured.swept_files) == (0, 0, 0)
    assert measured.free_disk_bytes > 0


def test_r4_unused_files_go_and_used_ones_stay(cache: Path) -> None:
    old, young = (
        put(cache / "a" / "old", age_s=2 * DAY_S),
        put(cache / "a" / "young", age_s=DAY_S / 2),
    )
    read = put(cache / "read", age_s=2 * DAY_S)
    os.utime(read, (time.time(), read.stat().st_mtime))
    measured = disk.sweep(cache, DAY_S)
    assert (measured.files, measured.bytes, measured.swept_files) == (2, 20, 1)
    assert (old.exists(), young.exists(), read.exists()) == (False, True, True)


def test_orphaned_temporary_files_go_and_those_being_written_stay(cache: Path) -> None:
    orphan = put(cache / "block.tmp", age_s=2 * disk.TEMPORARY_AGE_S)
    written = put(cache / "other.tmp")
    assert disk.sweep(cache, DAY_S).swept_files == 1
    assert (orphan.exists(), written.exists()) == (False, True)


def test_its_own_tag_outlives_every_sweep(cache: Path) -> None:
    for path in cache.iterdir():
        os.utime(path, (0, 0))
    assert disk.sweep(cache, DAY_S).swept_files == 0
    put(cache / "block")
    disk.prepare(cache)


@pytest.mark.parametrize(
    "tag", [None, b"Signature: 8a477f597d28d172789f06886806bc55\n# another program's"]
)
def test_a_directory_of_somebody_elses_files_is_left_alone(
    tmp_path: Path, tag: bytes | None
) -> None:
    """`--ssd-cache-dir ~/models` must not cost anybody their models."""
    theirs = put(tmp_path / "home" / "model.safetensors", age_s=365 * DAY_S)
    if tag is not None:
        (theirs.parent / "CACHEDIR.TAG").write_bytes(tag)
    theirs.parent.chmod(0o755)
    with pytest.raises(OSError, match="not empty"):
        disk.prepare(theirs.parent)
    assert theirs.exists()
    assert stat.S_IMODE(theirs.parent.stat().st_mode) == 0o755


def test_a_link_is_neither_followed_nor_counted(cache: Path, tmp_path: Path) -> None:
    outside = put(tmp_path / "outside" / "precious", age_s=365 * DAY_S)
    (cache / "link").symlink_to(outside.parent)
    (cache / "file-link").symlink_to(outside)
    assert disk.sweep(cache, DAY_S).swept_files == 0
    assert outside.exists()


def test_files_and_directories_may_vanish_meanwhile(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server may share the directory and sweep it at the same moment."""
    for name in ("a/1", "a/2", "b/3"):
        put(cache / name, age_s=2 * DAY_S)
    real = os.scandir

    def racing(path: Path) -> object:
        if Path(path).name == "b":
            (cache / "b" / "3").unlink()
            (cache / "b").rmdir()
        return real(path)

    monkeypatch.setattr(os, "scandir", racing)
    unlink = Path.unlink

    def unlink_twice(path: Path, *, missing_ok: bool = False) -> None:
        unlink(path)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_twice)
    measured = disk.sweep(cache, DAY_S)
    assert (measured.files, measured.swept_files) == (0, 2)


def test_a_file_that_vanishes_before_it_is_looked_at_is_no_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache / "gone")
    real = os.scandir

    class Vanishing:
        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.name, self.path = entry.name, entry.path

        def is_dir(self, *, follow_symlinks: bool) -> bool:
            return False

        def is_file(self, *, follow_symlinks: bool) -> bool:
            return True

        def stat(self, *, follow_symlinks: bool) -> os.stat_result:
            raise FileNotFoundError(self.path)

    class Scan:
        def __init__(self, path: Path) -> None:
            with real(path) as entries:
                self.entries = [Vanishing(entry) for entry in entries]

        def __enter__(self) -> list[Vanishing]:
            return self.entries

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(os, "scandir", Scan)
    assert disk.sweep(cache, DAY_S).files == 0


def test_a_place_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError):
            disk.prepare(path)


def test_two_servers_may_prepare_the_same_directory(cache: Path) -> None:
    (cache / f"{disk.TAG}-1{disk.TEMPORARY_SUFFIX}").touch()
    (cache / disk.TAG).unlink()
    disk.prepare(cache)
    assert (cache / disk.TAG).read_bytes() == disk.TAG_TEXT


@pytest.mark.parametrize("claimed", [True, False])
def test_two_writers_may_prepare_it_at_the_same_moment(
    cache: Path, monkeypatch: pytest.MonkeyPatch, claimed: bool
) -> None:
    """Models of one server have one process id, and servers in containers often have the same."""
    if not claimed:
        (cache / disk.TAG).unlink()
    write = Path.write_bytes

    def interrupted(path: Path, data: bytes) -> int:
        count = write(path, data)
        monkeypatch.setattr(Path, "write_bytes", write)
        disk.prepare(cache)
        return count

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    disk.prepare(cache)
    assert [path.name for path in cache.iterdir()] == [disk.TAG]


def test_files_of_the_future_age_from_now_on(cache: Path) -> None:
    """The clock was ahead when they were written: they would never be the oldest."""
    ahead, skewed = put(cache / "a" / "1", age_s=-365 * DAY_S), put(cache / "a" / "2", age_s=-60)
    before = skewed.stat().st_mtime
    assert disk.sweep(cache, DAY_S).swept_files == 0
    assert ahead.stat().st_mtime <= time.time() + 1
    assert skewed.stat().st_mtime == before
