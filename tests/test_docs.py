"""docs/actors.md says what the graph is."""

from __future__ import annotations

import re
from pathlib import Path

import attrs

import trouper
import trouper.web
from trouper.actors.graph import CHANNELS
from trouper.actors.runtime.channels import Edge
from trouper.actors.runtime.watches import Watches
from trouper.protocol.watch import Watch

DOCS = Path(__file__).parent.parent / "docs"
ACTORS = DOCS / "actors.md"


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
    assert described == {field.name for field in attrs.fields(Watches) if "Watch" in str(field.type)}
    assert Watch.__doc__


def test_the_reference_has_every_public_name_and_no_other() -> None:
    described = re.findall(r"^::: ([\w.]+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    public = [f"{module.__name__}.{name}" for module in (trouper, trouper.web) for name in module.__all__]
    assert sorted(described) == sorted(public)
