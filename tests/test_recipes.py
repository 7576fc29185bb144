"""The recipes of the justfile that pages and programs name, and the benchmark that needs neither a
model nor a server."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import trio

from benchmarks import metrics

ROOT = Path(__file__).parent.parent
SOURCES = ("benchmarks", "docs", "examples", "packages", "packaging", "tests", "trouper")


def test_each_recipe_that_is_named_is_there() -> None:
    recipes = set(
        re.findall(r"^(\w[\w-]*)(?: [^:\n]*)?:(?!=)", (ROOT / "justfile").read_text(), re.MULTILINE)
    )
    files = [
        path
        for name in SOURCES
        for path in (ROOT / name).rglob("*")
        if path.suffix in {".py", ".md"}
    ]
    named = {
        name
        for path in (*files, ROOT / "README.md")
        for name in re.findall(r"`just ([a-z][\w-]*)", path.read_text("utf-8"))
    }
    assert "serve" in named & recipes
    assert named <= recipes


def test_packages_are_installed_with_progress_at_a_terminal(tmp_path: Path) -> None:
    """The first command of the README took minutes without a word."""
    recipe = re.search(
        r"^_setup .*\n((?:    .*\n)+)", (ROOT / "justfile").read_text(), re.MULTILINE
    )
    assert recipe
    script = re.sub(r"^    @|\{\{.*?\}\}", "", recipe[1], flags=re.MULTILINE)
    (uv := tmp_path / "uv").write_text(f"#!/bin/sh\necho $* >> {tmp_path}/called\n")
    uv.chmod(0o755)
    variables = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    terminal, theirs = os.openpty()
    try:
        for errors in (theirs, subprocess.DEVNULL):
            command = ["sh", "-ec", script]
            subprocess.run(command, check=True, cwd=tmp_path, env=variables, stderr=errors)
    finally:
        os.close(terminal)
        os.close(theirs)
    called = (tmp_path / "called").read_text().splitlines()
    assert ["--quiet" in line for line in called] == [False, True]


def test_what_metrics_cost_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    trio.run(metrics.measure, 1, 2, 4)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said[1:]] == [
        "a step of 2 rows",
        "a scrape of one model",
        "the end of a request",
    ]
    assert said[0].startswith("2 streams, ")
