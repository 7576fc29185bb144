"""Damaged files never give wrong bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from tests.storage.making import (
    NAMESPACE,
    OTHER_NAMESPACE,
    all_runs,
    how_it_reads,
    path_of,
    put,
    wanted,
)
from trouper.protocol.blocks import BlockRef
from trouper.storage import run_format, run_reading
from trouper.storage.file_operations import Disk
from trouper.storage.runs import RunStore
from trouper.storage.stored_blocks import Damaged


def test_d9_every_byte_counts(store: RunStore) -> None:
    """One bit of each byte, length field, header, padding and data; all bits of the first ones."""
    run, pieces = put(store)
    path, good = path_of(store, run), path_of(store, run).read_bytes()
    ends = set()
    flips = [(at, bit) for at in range(48) for bit in range(8)] + [
        (at, at % 8) for at in range(48, len(good))
    ]
    for at, bit in flips:
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
        ends.add(how_it_reads(store, run, pieces))
        if at % 16 == 0:
            with pytest.raises(Damaged):
                store.verify(run.name)
    assert ends == {"torn", "checksum", "foreign"}
    path.write_bytes(good)
    assert how_it_reads(store, run, pieces) == "right"


def test_a_torn_file_is_damaged_wherever_it_ends(store: RunStore) -> None:
    run, pieces = put(store)
    path, good = path_of(store, run), path_of(store, run).read_bytes()
    for end in range(len(good)):
        path.write_bytes(good[:end])
        assert how_it_reads(store, run, pieces) == "torn"
    path.write_bytes(good + b"more")
    assert how_it_reads(store, run, pieces) == "torn"


def test_a_file_that_ends_while_it_is_read_is_torn(store: RunStore) -> None:
    run, pieces = put(store)

    class Shrinking(Disk):
        left = 0

        def pread(self, fd: int, count: int, offset: int) -> bytes:
            return super().pread(fd, count, offset) if offset + count <= self.left else b""

    disk = Shrinking()
    for disk.left in range(0, run.file_bytes, 7):
        assert how_it_reads(RunStore(store.directory, NAMESPACE, disk), run, pieces) == "torn"


def test_the_comparison_can_fail(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with checksums that always agree, the same flips are wrong bytes, and that
    is noticed."""
    run, pieces = put(store)
    path, good = path_of(store, run), path_of(store, run).read_bytes()

    class Agreeing(str):
        __slots__ = ()
        __hash__ = None  # type: ignore[assignment]

        def __ne__(self, other: object) -> bool:
            return False

    monkeypatch.setattr(run_reading, "xxh3_128_hexdigest", lambda data: Agreeing())
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert how_it_reads(store, run, pieces) == "wrong"


def test_a_run_under_another_name_is_foreign(store: RunStore) -> None:
    run, pieces = put(store)
    for name in (
        run.name.replace(run.name[0], "f" if run.name[0] != "f" else "0", 1),
        run.name.replace("-3-", "-4-"),
        put(store, seed=1)[0].name,
    ):
        shutil.copy(path_of(store, run), store.path / name)
        with pytest.raises(Damaged, match="foreign"):
            store.read(name, wanted(pieces))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (b"", "torn"),
        (b"{}", "torn"),
        (b"\x02" + bytes(7) + b"{}", "foreign"),
        (b"\xff" * 8 + b"{}", "torn"),
        (bytes(4096), "foreign"),
    ],
)
def test_files_that_are_no_runs(store: RunStore, kind: bytes, reason: str) -> None:
    run, pieces = put(store)
    path_of(store, run).write_bytes(kind)
    assert how_it_reads(store, run, pieces) == reason


def test_a_sound_header_that_says_nonsense_is_foreign(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a program with a bug, or of another version, would write it: its own checksum agrees."""
    nonsense: list[Callable[[dict[str, object]], object]] = [
        lambda header: header.update({"x9.0": header["b0.0"]}),
        lambda header: header.update({"b99.0": header["b0.0"]}),
        lambda header: header.update({"b": 1}),
        lambda header: header.update(
            {"b0.0": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 48]}}
        ),
        lambda header: header.update(
            {"b0.0": {"dtype": "F7", "shape": [48], "data_offsets": [0, 48]}}
        ),
        lambda header: header.update(
            {"b0.0": {"dtype": "BF16", "shape": [2, 4, 3], "data_offsets": [48, 0]}}
        ),
        lambda header: amend(header, "format", "trouper-run-99"),
        lambda header: amend(header, "keys", "zz"),
        lambda header: amend(header, "keys", ""),
        lambda header: amend(header, "tokens", "!"),
        lambda header: amend(header, "snapshots", "-"),
        lambda header: amend(header, "payloads", "0"),
        lambda header: amend(header, "parent", 7),
    ]
    run, pieces = put(store)
    path, good = path_of(store, run), path_of(store, run).read_bytes()
    for spoil in nonsense:
        path.write_bytes(resealed(good, spoil))
        with pytest.raises(Damaged, match=r"foreign|torn|checksum"):
            store.read(run.name, wanted(pieces))
    path.write_bytes(resealed(good, lambda header: None))
    assert how_it_reads(store, run, pieces) == "right", "what was tested is the nonsense"


def amend(header: dict[str, object], name: str, value: object) -> None:
    metadata = header["__metadata__"]
    assert isinstance(metadata, dict)
    metadata[name] = value


def resealed(good: bytes, change: Callable[[dict[str, object]], object]) -> bytes:
    size = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + size])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    length, rest = len(text).to_bytes(8, "little"), text[run_format.CHECKSUM_END :]
    return (
        length
        + run_format.OPENING
        + xxh3_128_hexdigest(length + rest).encode()
        + rest
        + good[8 + size :]
    )


def test_another_namespaces_run_is_foreign(store: RunStore) -> None:
    """Also where only the part of it that is not in the directory's name differs."""
    run, pieces = put(store)
    for namespace in (OTHER_NAMESPACE, NAMESPACE[:32] + OTHER_NAMESPACE[32:]):
        other = RunStore(store.directory, namespace)
        other.path.mkdir(exist_ok=True)
        if other.path != store.path:
            shutil.copy(path_of(store, run), other.path / run.name)
        assert how_it_reads(other, run, pieces) == "foreign"


def test_other_keys_or_tokens_than_expected_are_foreign(store: RunStore) -> None:
    run, pieces = put(store)
    first, second = pieces[:2]
    for expected in (
        BlockRef(second.key, first.tokens),
        BlockRef(first.key, second.tokens),
        BlockRef(run.parent, first.tokens),
        BlockRef(first.key[:-1], first.tokens),
        BlockRef(b"", b""),
        BlockRef(first.key, first.tokens, snapshot=True),
    ):
        with pytest.raises(Damaged, match="foreign"):
            store.read(run.name, [expected])


def test_a_vanished_file_is_damaged_too_and_removing_it_is_fine(store: RunStore) -> None:
    run, pieces = put(store)
    path_of(store, run).unlink()
    assert how_it_reads(store, run, pieces) == "vanished"
    store.touch([run.name])
    store.remove(run.name)
    store.remove("never-there.safetensors")
    assert store.total_bytes == 0


def test_a_link_is_not_followed(store: RunStore, tmp_path: Path) -> None:
    run, pieces = put(store)
    path_of(store, run).rename(tmp_path / "elsewhere")
    path_of(store, run).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        store.read(run.name, wanted(pieces))
    assert all_runs(RunStore(store.directory, NAMESPACE)) == []
