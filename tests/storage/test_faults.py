"""A thousand faults: nothing wrong is served, nothing sound is lost, bounds hold. (More: `python -m
tests.storage`.)"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from tests.storage.faults import WAYS
from tests.storage.worlds import World, campaign
from trouper.storage import run_format, run_reading
from trouper.storage.bounded_directory import BoundedDirectory
from trouper.storage.file_operations import Disk
from trouper.storage.stored_blocks import Damaged


def open_files() -> int:
    return sum(1 for _ in Path("/dev/fd").iterdir())


def test_nothing_wrong_comes_from_a_sick_disk(tmp_path: Path) -> None:
    files = open_files()
    injected, counts, _ = campaign(1000, tmp_path)
    assert open_files() == files, "a file is still open"
    for what in ("pieces served", "written", "evicted", "bounds checked", "reopened", "crashes"):
        assert counts[what] >= 20, f"the campaign hardly tests: {counts}"
    assert {f"at rest {way}" for way in WAYS} <= injected.keys()
    for operation in (
        "open",
        "create",
        "pread",
        "writev",
        "rename",
        "unlink",
        "stat",
        "files",
        "free",
    ):
        assert any(kind.startswith(operation) for kind in injected), f"{operation} never failed"


class Agreeing(str):
    """A checksum that is as expected, whatever that is."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __ne__(self, other: object) -> bool:
        return False


def test_the_campaign_notices_wrong_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the checksums of payloads."""
    monkeypatch.setattr(run_reading, "xxh3_128_hexdigest", lambda data: Agreeing())
    with pytest.raises(AssertionError, match="wrong bytes"):
        campaign(2000, tmp_path)


def test_the_campaign_notices_another_namespaces_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: keys, tokens and checksums agree there, too."""
    real = run_reading.open_run
    monkeypatch.setattr(
        "trouper.storage.runs.open_run", lambda disk, path, namespace: real(disk, path)
    )
    world = World(0, tmp_path / "cache")
    first, other = world.servers[0], world.servers[2]
    sealed = world._new(first)
    other.path.mkdir()
    (other.path / sealed.info.name).write_bytes(b"".join(sealed.buffers))
    with pytest.raises(AssertionError, match="wrong bytes"):
        world._settle(other.namespace)


def test_the_campaign_notices_a_lost_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a store that mistrusts every header."""

    def mistrust(name: str, *_: object) -> NoReturn:
        raise Damaged(name, "torn", "perhaps")

    monkeypatch.setattr(run_reading, "parse", mistrust)
    with pytest.raises(AssertionError, match="lost"):
        campaign(2000, tmp_path)


def test_the_campaign_notices_an_exceeded_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: nothing is ever evicted, and said to be."""
    monkeypatch.setattr(BoundedDirectory, "_evict_known", lambda *_: (True, []))
    with pytest.raises(AssertionError, match="too large"):
        campaign(2000, tmp_path)


def test_the_campaign_notices_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: cleaning up is forgotten."""

    def keep(disk: Disk, path: Path) -> None:
        if path.suffix == run_format.SUFFIX:
            path.unlink()

    monkeypatch.setattr("tests.storage.faults.FaultyDisk.unlink", keep)
    with pytest.raises(AssertionError, match="temporary"):
        campaign(2000, tmp_path)
