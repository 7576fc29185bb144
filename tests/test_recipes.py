"""The recipes of the justfile that pages and programs name, and the benchmark that needs neither a
model nor a server."""

from __future__ import annotations

import re
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


def test_what_metrics_cost_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    trio.run(metrics.measure, 1, 2, 4)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said[1:]] == [
        "a step of 2 rows",
        "a scrape of one model",
        "the end of a request",
    ]
    assert said[0].startswith("2 streams, ")
