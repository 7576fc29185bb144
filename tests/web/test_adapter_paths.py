"""POST /v1/load_lora_adapter takes adapters from the directories that were named, and tells nothing
of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.fakes import FakeEngine
from tests.web.serving import Served, exchange, post, serving
from trouper import Runtime, ServerSettings, SettingsInvalid
from trouper.actors.runtime.managed_model import load_problem
from trouper.protocol.paths import within
from trouper.protocol.problems import SYSTEM_SHORTAGE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Named as `link`. Beside it is `other`, which was not named."""
    for name in ("named/sql", "other/secret", "named-not"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("named")
    (tmp_path / "named" / "out").symlink_to("../other")
    (tmp_path / "named" / "loop").symlink_to("loop")
    (tmp_path / "other" / "in").symlink_to("../named/sql")
    return tmp_path


INSIDE = (
    "named",
    "named/sql",
    "link/sql",
    "named/none",
    "other/in",
    "other/../named/sql",
    "named//sql/.",
    "named/loop",
)
OUTSIDE = (
    "",
    "other",
    "other/none",
    "named/..",
    "named/../other",
    "named/out",
    "named/out/secret",
    "named/sql/../../other",
    "named-not",
    "named/../none",
    "link/out/none",
    "other/in/../../other",
    "named/\0",
    "named/\ud800",
)


def test_what_is_within_is_decided_by_what_a_path_means(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = [str(root / "link")]
    assert [path for path in INSIDE if within(f"{root}/{path}", named) is None] == []
    assert [path for path in OUTSIDE if within(f"{root}/{path}", named) is not None] == []
    assert within(f"{root}/other/in", named) == str((root / "named/sql").resolve()), (
        "no link that may change is left"
    )
    assert within(str(root / "named"), []) is None
    monkeypatch.chdir(root / "named")
    monkeypatch.setenv("HOME", str(root / "other"))
    assert within("sql", named) and not within("../other", named) and not within("~", named)
    assert not within("~nobody-of-this-name/x", [str(root / "other")])


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    directories: list[str] = []

    async def load(_: Runtime, name: str, directory: str, *more: Any) -> None:
        directories.append(directory)

    monkeypatch.setattr(Runtime, "load_adapter", load)
    return directories


async def load(served: Served, path: str) -> tuple[int, bytes]:
    status, _, body = await exchange(
        served, post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
    )
    return status, body


async def test_other_directories_are_refused_whether_they_are_there_or_not(
    root: Path, loaded: list[str]
) -> None:
    async with serving(FakeEngine(), adapters_from=(str(root / "link"),)) as served:
        answers = {
            (await load(served, f"{root}/{path}")) for path in OUTSIDE if "\ud800" not in path
        }
        answers |= {
            await load(served, "/etc"),
            await load(served, "/nonexistent"),
            await load(served, "/root/.ssh"),
        }
        [(status, body)] = answers
        error = json.loads(body)["error"]
        assert (status, error["code"], error["param"]) == (
            403,
            "adapter_path_not_allowed",
            "lora_path",
        )
        assert "--adapters-from" in error["message"] and str(root) not in error["message"]
        assert loaded == []
        assert (await load(served, f"{root}/named/sql"))[0] == 200
    assert loaded == [str((root / "named/sql").resolve())]


async def test_the_directories_of_adapters_are_named_too(root: Path, loaded: list[str]) -> None:
    settings = {"adapter": (f"sql={root / 'named/sql'}",)}
    async with serving(FakeEngine(), settings) as served:
        assert [(await load(served, f"{root}/{path}"))[0] for path in ("named/sql", "named")] == [
            200,
            403,
        ]


async def test_none_are_named_without_a_flag(root: Path, loaded: list[str]) -> None:
    async with serving(FakeEngine(), allow_admin_without_key=True) as served:
        assert (await load(served, str(root / "named")))[0] == 403


@pytest.mark.parametrize("directory", ["", " ", "none", "file"])
def test_what_is_no_directory_is_refused_at_the_start(directory: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    given = str(tmp_path / directory) if directory.strip() else directory
    with pytest.raises(SettingsInvalid, match=r"--adapters-from .* is no directory; give one"):
        ServerSettings(adapters_from=(given,))


async def test_without_a_thread_an_adapter_is_refused_for_the_moment(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lacks_a_thread(*_: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Runtime, "load_adapter", lacks_a_thread)
    async with serving(FakeEngine(), adapters_from=(str(root / "named"),)) as served:
        status, body = await load(served, f"{root}/named/sql")
    assert (status, json.loads(body)["error"]["code"]) == (503, SYSTEM_SHORTAGE.code)
    assert load_problem(RuntimeError("can't start new thread")).status == 503
