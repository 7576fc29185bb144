"""The sources of suites of others, and what is chosen of these, without any of the suites."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.other_suites import sources
from tests.other_suites.running import Outcome, Result, escaped, sort_files
from tests.other_suites.sources import lay_out
from tests.other_suites.suites import OVERLAYS, Suite, read_suites

SUITE = Suite(
    title="A suite",
    requirement="a-suite==1.2",
    sha256="",
    in_archive="a-suite-1.2/",
    in_repository="python/",
    sources=["tests/web", "tests/utils.py"],
    tests=["tests/web/*.py"],
    files_left_out={"asks no server": ["tests/web/test_unit*.py"]},
    left_out={},
    packages=[],
)
FILES = {
    "tests/web/test_chat.py": b"asks",
    "tests/web/test_unit.py": b"does not",
    "tests/utils.py": b"helps",
    "tests/website.py": b"is another",
    "src/a.py": b"is no test",
}


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of archives, with nothing laid over the suite."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TROUPER_SUITES", raising=False)
    overlays = tmp_path / "overlays"
    (overlays / "suite").mkdir(parents=True)
    monkeypatch.setattr(sources, "OVERLAYS", overlays)
    directory = tmp_path / "trouper" / "suites"
    directory.mkdir(parents=True)
    return directory


def written(home: Path) -> dict[str, bytes]:
    return {
        path.relative_to(home).as_posix(): path.read_bytes()
        for path in home.rglob("*")
        if path.is_file()
    }


SELECTED = {name: FILES[name] for name in list(FILES)[:3]}


def test_an_archive_that_was_kept_is_read_without_its_registry(
    cached: Path, tmp_path: Path
) -> None:
    archive = cached / "a-suite-1.2.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in FILES.items():
            member = tarfile.TarInfo(f"a-suite-1.2/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    suite = attrs.evolve(SUITE, sha256=sources.sha256_of(archive))
    home = tmp_path / "home"
    assert lay_out("suite", suite, home) == "1.2"
    assert written(home) == SELECTED


def test_a_checkout_is_read_instead_of_the_archive(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkouts" / "suite"
    for name, content in FILES.items():
        path = checkout / "python" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.setenv("TROUPER_SUITES", str(checkout.parent))
    home = tmp_path / "home"
    assert lay_out("suite", SUITE, home) == f"as in {checkout}"
    assert written(home) == SELECTED


def test_a_file_is_collected_left_out_or_named() -> None:
    there = ["tests/web/test_chat.py", "tests/web/test_unit.py", "tests/other/test_new.py"]
    collected, left_out, unlisted, idle = sort_files(SUITE, there)
    assert collected == ["tests/web/test_chat.py"]
    assert left_out == {"asks no server": 1}
    assert unlisted == ["tests/other/test_new.py"]
    assert idle == []
    assert sort_files(SUITE, there[:1])[3] == ["tests/web/test_unit*.py"]


def test_brackets_of_parameters_are_no_sets_of_characters() -> None:
    assert escaped("*::test_a[b]*") == "*::test_a[[]b]*"


@pytest.mark.parametrize(
    ("change", "is_right"),
    [
        ({}, True),
        ({"tests": []}, False),
        ({"tests": [Result("a", "failed")]}, False),
        ({"unlisted": ["a"]}, False),
        ({"idle": ["a"]}, False),
        ({"problem": "a"}, False),
    ],
)
def test_a_run_is_right_if_all_of_it_passed_or_is_explained(
    change: dict[str, Any], is_right: bool
) -> None:
    _, left_out, _, _ = sort_files(SUITE, [])
    right = Outcome("", "", [Result("a", "passed"), Result("b", "left out")], [], left_out, [], [])
    assert attrs.evolve(right, **change).is_right is is_right


def test_every_overlay_has_its_suite_and_every_pattern_a_reason() -> None:
    suites = read_suites()
    assert {path.name for path in OVERLAYS.iterdir()} < set(suites)
    for suite in suites.values():
        assert len(suite.sha256) == 64
        assert suite.version
        assert all(suite.left_out) and all(suite.files_left_out)
        assert all([*suite.left_out.values(), *suite.files_left_out.values()])
