"""The documentation as a site: strictly built, with a place for each page, and nothing from other
hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\bsrc=["']?(?:https?:)?//|"""
    r"""<link\b[^>]*\bhref=["']?(?:https?:)?//|url\(["']?(?:https?:)?//|@import\s+["'](?:https?:)?//"""
)
"""What a browser asks for without being told to by a click."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page without a place in the navigation, a broken link or a name that the reference does not
    find fail it."""
    target = tmp_path_factory.mktemp("site")
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return target


def test_nothing_comes_from_another_host(site: Path) -> None:
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 15
    assert {
        page.name: found.group()
        for page in pages
        if (found := FETCHED.search(page.read_text("utf-8")))
    } == {}
    assert FETCHED.search('<link rel="stylesheet" href="https://fonts.example/a.css">')


def test_what_pages_include_is_there(site: Path) -> None:
    """The table of flags, examples, and names out of the code."""
    assert "--completion-batch-size" in (site / "flags" / "index.html").read_text("utf-8")
    embedding = (site / "embedding" / "index.html").read_text("utf-8")
    assert "run_summarizer" in embedding
    assert "The client's end of one request." in embedding


@pytest.mark.parametrize(
    ("typed", "page"),
    [
        ("gguf", "troubleshooting/"),
        ("gguf", "coming-from/"),
        ("ollama", "coming-from/#ollama"),
        ("slow", "troubleshooting/#answers-are-slow"),
        ("out of memory", "troubleshooting/#memory-or-disk-fills-up"),
        ("which model", "choosing-a-model/#which-model-for-how-much-memory"),
    ],
)
def test_the_search_finds_what_users_type(site: Path, typed: str, page: str) -> None:
    """The index has a section of that page with all words that are typed."""
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    texts = {each["location"]: f"{each['title']} {each['text']}".lower() for each in index["docs"]}
    matching = {
        address
        for address, text in texts.items()
        if all(re.search(rf"\b{word}", text) for word in typed.split())
    }
    assert page in {address[: len(page)] for address in matching}
