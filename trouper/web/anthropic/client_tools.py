"""Tools with inputs that Anthropic's documentation defines (bash, text editor, memory). Tools of
Anthropic's servers are skipped."""

from __future__ import annotations

from typing import Any

from trouper.web.http.leniency import Skip, safe_name
from trouper.web.http.request_schema import Json
from trouper.web.openai.other_tools import CHOICES

TEXT: Json = {"type": "string"}
NUMBERS: Json = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
INPUTS: dict[str, tuple[str, Json, list[str]]] = {
    "bash": (
        "Runs a command in a bash session that stays open.",
        {
            "command": TEXT,
            "restart": {"type": "boolean", "description": "Start the session anew instead."},
        },
        [],
    ),
    "text_editor": (
        (
            "Views, creates and edits files. `view` shows a file, or lines of it, or lists a "
            "directory; `create` writes a file; "
            "`str_replace` replaces a text that occurs once; `insert` inserts text behind a line."
        ),
        {
            "command": {"enum": ["view", "create", "str_replace", "insert", "undo_edit"]},
            "path": TEXT,
            "view_range": {**NUMBERS, "description": "First and last line, from 1; -1 is the end."},
            "file_text": TEXT,
            "old_str": TEXT,
            "new_str": TEXT,
            "insert_line": {"type": "integer"},
            "insert_text": TEXT,
        },
        ["command", "path"],
    ),
    "memory": (
        (
            "Keeps notes as files below /memories: `view`, `create`, `str_replace`, `insert`, "
            "`delete`, `rename`."
        ),
        {
            "command": {"enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            "path": TEXT,
            "view_range": NUMBERS,
            "file_text": TEXT,
            "old_str": TEXT,
            "new_str": TEXT,
            "insert_line": {"type": "integer"},
            "insert_text": TEXT,
            "old_path": TEXT,
            "new_path": TEXT,
        },
        ["command"],
    ),
}
"""By type without date: description, properties, required properties."""
READ = ("name", "cache_control")


def client_tools_adapted(value: Json, skip: Skip) -> Json:
    """Give client tools the API's inputs; skip and name server tools."""
    value = _choice_adapted(value)
    tools = value.get("tools")
    if not isinstance(tools, list):
        return value
    kept = [adapted for tool in tools if (adapted := _adapted(tool, skip)) is not None]
    if any(_searches(tool) for tool in tools):
        kept = [_loaded(tool, skip) for tool in kept]
    if kept or not tools:
        return value | {"tools": kept}
    rest = {name: given for name, given in value.items() if name != "tools"}
    if isinstance(rest.get("tool_choice"), dict) and rest["tool_choice"].get("type") in (
        "auto",
        "none",
    ):
        del rest["tool_choice"]
    return rest


def _adapted(tool: Any, skip: Skip) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind == "custom":
        return tool
    if kind == "function" and isinstance(tool.get("function", tool).get("name"), str):
        return _of_openai(tool.get("function", tool))
    base = kind.rstrip("0123456789").rstrip("_")
    if base not in INPUTS or "name" not in tool:
        skip(f"tools.{safe_name(kind)}")
        return None
    description, properties, required = INPUTS[base]
    for name in sorted(tool.keys() - {"type", *READ}):
        skip(f"tools.{safe_name(name)}")
    schema = {"type": "object", "properties": properties, "required": required}
    return {name: tool[name] for name in READ if name in tool} | {
        "description": description,
        "input_schema": schema,
    }


def _searches(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind.startswith("tool_search_tool")


def _loaded(tool: Any, skip: Skip) -> Any:
    """No model would find a deferred tool without Anthropic's search."""
    if not isinstance(tool, dict) or "defer_loading" not in tool:
        return tool
    if tool["defer_loading"]:
        skip("tools.defer_loading")
    return {name: value for name, value in tool.items() if name != "defer_loading"}


def _of_openai(function: Json) -> Json:
    rest = {
        name: function[name]
        for name in ("name", "description", "strict")
        if function.get(name) is not None
    }
    return rest | {"input_schema": function.get("parameters") or {"type": "object"}}


def _choice_adapted(value: Json) -> Json:
    """Read a choice in OpenAI's format."""
    choice = value.get("tool_choice")
    if isinstance(choice, str) and choice in CHOICES:
        kind = "any" if CHOICES[choice] == "required" else CHOICES[choice]
        return value | {"tool_choice": {"type": kind}}
    if isinstance(choice, dict) and choice.get("type") == "function":
        inner = choice.get("function", choice)
        if isinstance(inner, dict) and isinstance(inner.get("name"), str):
            return value | {"tool_choice": {"type": "tool", "name": inner["name"]}}
    if isinstance(choice, dict) and choice.get("type") == "required":
        return value | {"tool_choice": {**choice, "type": "any"}}
    return value
