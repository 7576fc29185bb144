"""Each tutorial is played as it is written: its blocks in their order, in a home of its own, beside
the server that it starts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.commands import COMMANDS, ROOT, THE_PAGES_SERVER, Block, all_blocks
from tests.test_commands import ADDRESS, PATIENCE_S, environment_of, serving

TUTORIALS = sorted((ROOT / "docs").glob("tutorial-*.md"))
MAX_WORDS = 700


def blocks_of(page: Path) -> list[Block]:
    return [block for block in all_blocks() if block.page == page and block.language in COMMANDS]


def play(block: Block, environment: Mapping[str, str], port: int | None) -> str:
    """Return its output."""
    assert port or ADDRESS not in block.text, f"{block.name} stands before its server"
    command = ["bash", "-euo", "pipefail"] if block.language == "sh" else [sys.executable, "-"]
    ran = subprocess.run(
        command,
        input=block.text.replace(ADDRESS, f"127.0.0.1:{port}"),
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 0, f"{block.name}: {ran.stderr[-2000:]}"
    return ran.stdout


@pytest.mark.skipif(
    shutil.which("just") is None, reason="just is what starts the server: pip install rust-just"
)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
@pytest.mark.long(but=("tutorial-api",))
def test_a_tutorial_works_from_its_first_line_to_its_last(page: Path, tmp_path: Path) -> None:
    environment = environment_of(tmp_path) | {"HOME": str(tmp_path)}
    environment |= {"UV_PYTHON": sys.executable, "UV_PYTHON_DOWNLOADS": "never"}
    blocks = blocks_of(page)
    [first] = [i for i, block in enumerate(blocks) if block.run == THE_PAGES_SERVER]
    for block in blocks[:first]:
        if not block.not_run:
            play(block, environment, None)
    with serving(blocks[first], environment) as port:
        for block in blocks[first + 1 :]:
            if not block.not_run:
                assert play(block, environment, port).strip(), f"{block.name} said nothing"


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_is_read_in_ten_minutes(page: Path) -> None:
    assert len(page.read_text("utf-8").split()) <= MAX_WORDS


def test_a_tutorial_for_each_kind_of_user() -> None:
    assert [page.stem for page in TUTORIALS] == [
        "tutorial-agent",
        "tutorial-api",
        "tutorial-operator",
    ]
