"""Scripts: a Python function, a JSON file with one answer for each turn, and the one that is there
without either."""

from __future__ import annotations

import importlib.util
import json
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.scripted.conversation import Conversation, Script


def script_of(name: str) -> Script:
    """`tests.clients.loops:script`, `some/file.py`, `some/file.py:script`, `some/file.json`, or
    `echo`."""
    if name == "echo":
        return echo
    if name.endswith(".json"):
        return of_turns(json.loads(Path(name).read_text("utf-8")))
    where, _, function = name.partition(":")
    module = _file(Path(where)) if where.endswith(".py") else import_module(where)
    script: Script = getattr(module, function or "script")
    return script


def _file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_turns(turns: list[dict[str, Any]]) -> Script:
    """One answer for each turn, the last one from then on: {"text", "reasoning", "calls": [{"name",
    "arguments"}]} or {"raw"}."""

    def script(conversation: Conversation) -> str:
        turn = turns[min(conversation.turn, len(turns) - 1)]
        if "raw" in turn:
            return str(turn["raw"])
        text, reasoning = turn.get("text", ""), turn.get("reasoning", "")
        if calls := turn.get("calls", ()):
            return conversation.calls(
                *((call["name"], call["arguments"]) for call in calls),
                text=text,
                reasoning=reasoning,
            )
        return conversation.answer(text, reasoning=reasoning)

    return script


def echo(conversation: Conversation) -> str:
    """Says the question again; after a result, the result."""
    heard = conversation.results[-1] if conversation.last_role == "tool" else conversation.question
    return conversation.answer(f"You said: {heard}")
