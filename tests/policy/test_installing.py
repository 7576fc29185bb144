"""The command that installs an extra: as this Trouper was installed, and no name that a stranger
may register."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from trouper.protocol import installing

WHEEL = "file:///home/a%20b/trouper-0.1.0-py3-none-any.whl"
CHECKOUT = {"url": "file:///src/trouper", "dir_info": {"editable": True}}


class Installed:
    """A distribution whose origin is this."""

    def __init__(self, origin: Any) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


@pytest.fixture(autouse=True)
def _unread() -> Iterator[None]:
    installing.read_origin.cache_clear()
    yield
    installing.read_origin.cache_clear()


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (CHECKOUT, "uv sync --frozen --inexact --extra otel"),
        ({"url": "file:///src/trouper", "dir_info": {}}, "pip install '/src/trouper[otel]'"),
        (
            {"url": WHEEL, "archive_info": {}},
            "pip install '/home/a b/trouper-0.1.0-py3-none-any.whl[otel]'",
        ),
        (
            {"url": "https://example.org/trouper.whl", "archive_info": {}},
            "pip install 'trouper[otel] @ https://example.org/trouper.whl'",
        ),
        (None, "pip install 'trouper[otel]'"),
    ],
    ids=("checkout", "directory", "wheel", "address", "index"),
)
def test_an_extra_is_installed_from_where_trouper_is_from(
    origin: Any, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installing, "distribution", lambda _: Installed(origin))
    assert installing.command_for("otel") == command


def test_a_tool_of_uv_has_no_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "uv-receipt.toml").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(installing, "distribution", lambda _: Installed({"url": WHEEL}))
    command = installing.command_for("demo")
    assert command == "uv tool install --force '/home/a b/trouper-0.1.0-py3-none-any.whl[demo]'"


def test_a_tool_of_uv_keeps_the_extras_that_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """uv makes the environment anew: without `cpu` there would be no MLX in it."""
    receipt = '[tool]\nrequirements = [{ name = "trouper", extras = ["cpu"], directory = "/d" }]\n'
    (tmp_path / "uv-receipt.toml").write_text(receipt)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(installing, "distribution", lambda _: Installed({"url": "file:///d"}))
    assert installing.command_for("demo") == "uv tool install --force '/d[cpu,demo]'"


def test_without_installation_it_is_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installing, "distribution", missing)
    assert installing.command_for("cpu") == "uv sync --frozen --inexact --extra cpu"


def test_no_message_names_an_index_that_may_be_a_strangers() -> None:
    package = Path(installing.__file__).parent.parent
    named = [
        path.name for path in package.rglob("*.py") if "pip install 'trouper" in path.read_text()
    ]
    assert named == []
