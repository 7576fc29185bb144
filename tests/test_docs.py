"""Pages of docs/ that describe the code: the graph, the public names, paths of files, and codes."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest

import trouper
import trouper.web
from trouper.actors.graph import CHANNELS
from trouper.actors.runtime.channels import Edge, Watches
from trouper.protocol.watch import Watch
from trouper.web.http.same_origin import EXPOSED

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "trouper"
LAB = ROOT / "packages" / "trouper-lab" / "trouper_lab"
BASES = (ROOT, PACKAGE, LAB.parent, *(path for path in PACKAGE.iterdir() if path.is_dir()))
TOP = {"trouper", *(path.name for path in PACKAGE.iterdir() if path.is_dir())}
ACTORS = DOCS / "actors.md"
MAX_WORDS = 56_000
MAX_WORDS_OF_A_PAGE = 2500
"""Bars of tables count as words."""


def test_pages_are_short_enough_to_be_read() -> None:
    """What is measured stands in benchmarks/RESULTS.md, and each thing once."""
    words = {page.name: len(page.read_text("utf-8").split()) for page in DOCS.glob("*.md")}
    assert {page: count for page, count in words.items() if count > MAX_WORDS_OF_A_PAGE} == {}
    assert sum(words.values()) <= MAX_WORDS


def table_below(heading: str) -> list[list[str]]:
    section = ACTORS.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def test_the_table_of_channels_is_the_graph() -> None:
    documented = {
        name.strip("`"): Edge(source, target, int(capacity), policy)
        for name, source, target, capacity, policy in table_below("Channels")
    }
    assert documented == CHANNELS


def test_every_actor_of_the_graph_is_described_and_no_other() -> None:
    ends = (end for edge in CHANNELS.values() for end in (edge.source, edge.target))
    wired = {actor for end in ends for actor in end.split(", ")} - {"edge"}
    assert {row[0] for row in table_below("Who is who")} == wired


def test_every_watch_is_described_and_no_other() -> None:
    described = {name for row in table_below("Watches") for name in re.findall(r"`(\w+)`", row[0])}
    assert described == {
        field.name for field in attrs.fields(Watches) if "Watch" in str(field.type)
    }
    assert Watch.__doc__


def test_the_reference_has_every_public_name_and_no_other() -> None:
    described = re.findall(r"^::: ([\w.]+)$", (DOCS / "embedding.md").read_text(), re.MULTILINE)
    public = [
        f"{module.__name__}.{name}" for module in (trouper, trouper.web) for name in module.__all__
    ]
    assert sorted(described) == sorted(public)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_each_path_of_a_page_exists(page: Path) -> None:
    """Written from the checkout, from the package, or from one of its directories
    (`openai/errors.py`)."""
    paths = set(
        re.findall(
            r"(?<![\w./~-])((?:\w+/)+(?:\w+\.py)?)(?=[`), :;]|$)", page.read_text(), re.MULTILINE
        )
    )
    ours = {path for path in paths if path.endswith(".py") or path.split("/")[0] in TOP}
    assert {path for path in ours if not any((base / path).exists() for base in BASES)} == set()


def test_the_tree_has_each_package_and_no_file_that_is_not_there() -> None:
    page = (DOCS / "where-things-are.md").read_text()
    tree = page.split("```")[1]
    names = re.findall(r"\w+(?:\.py|/)", tree)
    inside = [*PACKAGE.rglob("*"), *LAB.rglob("*")]
    there = {path.name + "/" * path.is_dir() for path in [*inside, PACKAGE, LAB]}
    assert set(names) <= there
    packages = {f"{path.parent.name}/" for path in inside if path.name == "__init__.py"}
    assert packages <= set(names)


def test_each_header_that_a_page_may_read_is_named() -> None:
    page = (DOCS / "browsers.md").read_text()
    names = {re.sub(r"^(x-ratelimit)-.*", r"\1-*", name) for name in EXPOSED.split(", ")}
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_each_code_that_is_cited_has_its_line() -> None:
    defined = re.findall(r"^\| ([FRD][0-9]+) \|", (DOCS / "codes.md").read_text(), re.MULTILINE)
    assert len(defined) == len(set(defined))
    dtypes = {"F32", "F64"}
    files = [
        *PACKAGE.rglob("*.py"),
        *LAB.rglob("*.py"),
        *(ROOT / "tests").rglob("*.py"),
        *DOCS.glob("*.md"),
    ]
    cited = {
        code
        for file in files
        for code in re.findall(r"\b[FRD][0-9]{1,2}\b", file.read_text("utf-8"))
    }
    assert cited - dtypes <= set(defined)
