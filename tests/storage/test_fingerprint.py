"""Another byte anywhere is another fingerprint; what has not changed is not read again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128_hexdigest

from trouper.storage import cache_fingerprint
from trouper.storage.cache_fingerprint import file_digest, namespace

CONTENT = bytes(range(256)) * 10_000


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model" / "weights.safetensors"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def memo(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "digests.json"


@pytest.fixture(autouse=True)
def files_age_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_fingerprint, "YOUNG_S", -1.0)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that were read."""
    paths: list[Path] = []
    real = cache_fingerprint._hash

    def recording(path: Path, *more: Any) -> str:
        paths.append(path)
        return real(path, *more)

    monkeypatch.setattr(cache_fingerprint, "_hash", recording)
    return paths


def test_it_is_of_the_content(weights: Path, memo: Path, tmp_path: Path) -> None:
    assert file_digest(weights, None) == file_digest(weights, memo) == xxh3_128_hexdigest(CONTENT)
    copy = tmp_path / "copy"
    copy.write_bytes(CONTENT)
    assert file_digest(copy, memo) == file_digest(weights, memo)
    (tmp_path / "empty").touch()
    assert file_digest(tmp_path / "empty", memo) == xxh3_128_hexdigest(b"")


def test_who_listens_hears_of_every_byte_that_is_read(weights: Path, memo: Path) -> None:
    heard: list[int] = []
    for _ in range(2):
        file_digest(weights, memo, heard.append)
    assert (len(heard), sum(heard)) == (3, len(CONTENT))


def test_it_is_read_once_by_whatever_name(
    weights: Path, memo: Path, hashed: list[Path], tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(weights)
    assert len({file_digest(path, memo) for path in (weights, link, weights)}) == 1
    assert hashed == [weights.resolve()]


@pytest.mark.parametrize("at", [0, 1 << 20, len(CONTENT) - 1])
def test_one_byte_changes_it_even_when_size_and_time_are_as_before(
    weights: Path, memo: Path, at: int
) -> None:
    before, stat = file_digest(weights, memo), weights.stat()
    with weights.open("r+b") as file:
        file.seek(at)
        file.write(bytes([CONTENT[at] ^ 1]))
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    while weights.stat().st_ctime_ns == stat.st_ctime_ns:  # The clock ticks in milliseconds.
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = weights.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        stat.st_size,
        stat.st_mtime_ns,
        stat.st_ino,
    )
    assert file_digest(weights, memo) != before


def test_a_file_that_changed_just_now_is_not_remembered(
    weights: Path, memo: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_fingerprint, "YOUNG_S", 3.0)
    for _ in range(2):
        file_digest(weights, memo)
    assert len(hashed) == 2
    assert not memo.exists()


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    weights: Path, memo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cache_fingerprint._hash

    def racing(path: Path, *more: Any) -> str:
        digest = real(path, *more)
        path.write_bytes(b"changed")  # Its size differs, whatever the clock says.
        return digest

    monkeypatch.setattr(cache_fingerprint, "_hash", racing)
    file_digest(weights, memo)
    assert not memo.exists()


@pytest.mark.parametrize(
    "spoiled", [b"", b"{", b"[]", b'{"x": 1}', b"\xff\xfe", b'{"x": {"state": {}, "digest": 1}}']
)
def test_a_damaged_memo_is_ignored_and_replaced(
    weights: Path, memo: Path, hashed: list[Path], spoiled: bytes
) -> None:
    memo.parent.mkdir()
    memo.write_bytes(spoiled)
    for _ in range(2):
        assert file_digest(weights, memo) == xxh3_128_hexdigest(CONTENT)
    assert len(hashed) == 1


def test_a_memo_keeps_what_others_wrote(
    weights: Path, memo: Path, hashed: list[Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x")
    for path in (other, weights, other):
        file_digest(path, memo)
    assert len(hashed) == 2


def test_a_memo_that_cannot_be_written_costs_only_time(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert file_digest(weights, tmp_path / "file" / "memo") == xxh3_128_hexdigest(CONTENT)
    (tmp_path / "memo").mkdir()
    assert file_digest(weights, tmp_path / "memo") == xxh3_128_hexdigest(CONTENT)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path, memo: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file_digest(tmp_path / "none", memo)


def test_a_namespace_depends_on_every_name_and_value_and_not_on_their_order() -> None:
    parts = {"weights": "abc", "kv_bits": "8"}
    assert namespace(parts) == namespace(dict(reversed(parts.items())))
    assert len(bytes.fromhex(namespace(parts))) == 32
    others = [
        {},
        {"weights": "abc"},
        {**parts, "kv_bits": "4"},
        {"weights": "8", "kv_bits": "abc"},
        {"weightsabc": "8"},
    ]
    assert len({namespace(other) for other in (parts, *others)}) == 6
    assert namespace({"a": 'b","c":"d'}) != namespace({"a": "b", "c": "d"})
