"""What agents send, without what it says: the bodies of their requests with a stand-in for each
text.

The texts are their makers'; what a server has to understand is the rest: names, types, schemas, and
what is sent back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.scripted.process import recorded

BODIES = Path(__file__).parent / "bodies"
TEXTS = {
    "description",
    "text",
    "content",
    "instructions",
    "system",
    "output",
    "title",
    "user_id",
    "x-codex-turn-metadata",
}
"""Members whose strings are texts. In a schema these are names of parameters, too, whose values are
objects and stay."""
STAND_IN = "some text"


def shape(value: Any, directory: str, name: str = "") -> Any:
    """The value with stand-ins. `directory`: where the agent worked, which is another one each
    time."""
    if isinstance(value, dict):
        return {key: shape(part, directory, key) for key, part in value.items()}
    if isinstance(value, list):
        return [shape(part, directory, name) for part in value]
    if isinstance(value, str):
        return STAND_IN if name in TEXTS and value else value.replace(directory, "/home/agent")
    return value


def shapes(record: Path, directory: str) -> Iterator[dict[str, Any]]:
    """Of each conversation of a recorded session the request with most messages: {"path",
    "body"}."""
    latest: dict[str, dict[str, Any]] = {}
    for line in recorded(record):
        if line["method"] == "POST":
            body = json.loads(line["body"])
            tools = [str(tool.get("name")) for tool in body.get("tools", ())]
            messages = body.get("messages") or body.get("input")
            latest[f"{line['path']} {tools} {messages[0]}"] = {"path": line["path"], "body": body}
    return (shape(request, directory) for request in latest.values())


def save(agent: str, requests: Sequence[Mapping[str, Any]]) -> None:
    BODIES.mkdir(exist_ok=True)
    (BODIES / f"{agent}.json").write_text(
        json.dumps(requests, indent=1, ensure_ascii=False) + "\n", "utf-8"
    )


def load(agent: str) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = json.loads((BODIES / f"{agent}.json").read_text("utf-8"))
    return requests
