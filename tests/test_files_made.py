"""Every file that is made has the mode of the table in docs/operating.md, under the worst umask,
and belongs to the user."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import httpx2
import pytest

from tests.cli.agent_homes import SERVED
from tests.families import save
from tests.owners import without_umask
from tests.web.batching import ended, output, request, started, strict
from trouper.cli.commands.connect import AGENTS, _merge
from trouper.cli.conversation import Conversation
from trouper.cli.kept_chats import KeptChats
from trouper.cli.line_editor import history

SERVE = (
    sys.executable,
    "-c",
    "from trouper.cli import main; main()",
    "serve",
    "--port",
    "0",
    "--ssd-keep-free",
    "0",
)
DOCS = Path(__file__).parents[1] / "docs" / "operating.md"
ROW = re.compile(r"^\| `(~/[^|]*)`[^|]*\| (\d+|umask) \|", re.MULTILINE)
AS_MADE = {"umask"}
NOT_PLAYED = {"~/.cache/trouper/models/*/", "~/.cache/trouper/models/*"}
"""The embedded model has a test of its own."""


def documented() -> list[tuple[str, str]]:
    """Patterns of paths and their modes; the first that fits counts, and one that ends in / is
    of directories."""
    text = DOCS.read_text().partition("\n## Files\n")[2].partition("\n## ")[0]
    return [
        (pattern, mode)
        for patterns, mode in ROW.findall(text)
        for pattern in patterns.split("`, `")
    ]


def found_in(home: Path) -> Iterator[tuple[str, Path]]:
    for path in home.rglob("*"):
        yield f"~/{path.relative_to(home)}{'/' if path.is_dir() else ''}", path


def row_of(name: str, table: list[tuple[str, str]]) -> tuple[str, str] | None:
    """Find the row of a path. Directories above a row's pattern have its mode: they are made
    with it."""
    for pattern, mode in table:
        if fnmatch(name, pattern) and name.endswith("/") >= pattern.endswith("/"):
            return pattern, mode
        if name.endswith("/") and pattern.startswith(name):
            return name, "700"
    return None


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home under umask 0, and a TMPDIR that all may write to."""
    (home := tmp_path / "home").mkdir(0o700)
    (shared := tmp_path / "tmp").mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(shared))
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    with without_umask():
        yield home


def play_server(tmp_path: Path) -> None:
    """Blocks on disk, digests and self-checks, a schema, a stored response, an upload and a
    batch."""
    save("llama", model := tmp_path / "model")
    process = subprocess.Popen(
        [*SERVE, "--model", str(model)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().rsplit(" ", 1)[1].strip()
        with strict(url) as client:
            client.completions.create(model="m", prompt="abc " * 300, max_tokens=3)
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
            body = {"prompt": "a", "max_tokens": 3, "structured_outputs": {"json": schema}}
            assert httpx2.post(f"{url}/completions", json=body).status_code == 200
            httpx2.post(
                f"{url}/responses", json={"input": "a", "max_output_tokens": 16}
            ).raise_for_status()
            batch = ended(client, started(client, [request("one")]))
            assert output(client, batch.output_file_id)
    finally:
        process.terminate()
        process.communicate()


def test_every_file_has_the_mode_that_the_page_says(home: Path, tmp_path: Path) -> None:
    play_server(tmp_path)
    for agent in ("claude", "codex"):
        _merge(AGENTS[agent], AGENTS[agent].setup(SERVED).files, write=True)
    history()
    KeptChats.opened().keep(Conversation(messages=[{"role": "user", "content": "hi"}]))
    table, seen, wrong = documented(), set[str](), list[str]()
    for name, path in found_in(home):
        info = path.lstat()
        row = row_of(name, table)
        mode = f"{info.st_mode & 0o7777:o}"
        if (
            row is None
            or row[1] not in (AS_MADE | {mode})
            or info.st_uid != os.geteuid()
            or path.is_symlink()
        ):
            wrong.append(f"{name} {mode} of {info.st_uid}: {row}")
        seen.add(row[0] if row else "")
    assert wrong == []
    assert {pattern for pattern, _ in table} - seen <= NOT_PLAYED, (
        "rows of the table that no file has"
    )
    assert [*(tmp_path / "tmp").iterdir()] == []
    assert any(home.rglob("*.safetensors"))


@pytest.mark.parametrize(
    "name",
    ["~/.cache/trouper/new", "~/.cache/other/", "~/.config/trouper/x", "~/.local/state/trouper/x"],
)
def test_what_is_not_in_the_table_is_seen(name: str) -> None:
    assert row_of(name, documented()) is None
