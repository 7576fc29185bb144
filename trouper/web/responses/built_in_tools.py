"""Shell and patch tools of the responses API: the API defines the parameters, and the client runs
the tools.

The model sees functions. Source of the fields: the `openai` package (local_shell_call, shell_call,
apply_patch_call).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from trouper.web.output.tool_forms import Json, ToolForm, ToolKind, ToolOffer

BuiltInKind = Literal["local_shell", "shell", "apply_patch"]
TEXT: Json = {"type": "string"}
MILLISECONDS: Json = {"type": "integer", "description": "Time limit in milliseconds."}
DESCRIPTIONS: dict[BuiltInKind, str] = {
    "local_shell": "Runs a command on the user's machine and returns its output.",
    "shell": "Runs shell commands on the user's machine and returns their output.",
    "apply_patch": "Creates, changes or deletes a file by a patch.",
}
PARAMETERS: dict[BuiltInKind, Json] = {
    "local_shell": {
        "command": {
            "type": "array",
            "items": TEXT,
            "description": "The program and its arguments.",
        },
        "working_directory": TEXT,
        "timeout_ms": MILLISECONDS,
        "env": {
            "type": "object",
            "additionalProperties": TEXT,
            "description": "Variables of the environment.",
        },
    },
    "shell": {
        "commands": {
            "type": "array",
            "items": TEXT,
            "description": "Commands, each a line for the shell.",
        },
        "timeout_ms": MILLISECONDS,
        "max_output_length": {"type": "integer", "description": "Most characters of output."},
    },
    "apply_patch": {
        "type": {"enum": ["create_file", "update_file", "delete_file"]},
        "path": TEXT,
        "diff": {
            "type": "string",
            "description": "The change as a unified diff in V4A format; none to delete a file.",
        },
    },
}
REQUIRED: dict[BuiltInKind, list[str]] = {
    "local_shell": ["command"],
    "shell": ["commands"],
    "apply_patch": ["type", "path"],
}


def built_in_offer(kind: BuiltInKind) -> ToolOffer:
    parameters = {
        "type": "object",
        "properties": PARAMETERS[kind],
        "required": REQUIRED[kind],
        "additionalProperties": False,
    }
    return ToolOffer(
        ToolForm(kind, kind), {"description": DESCRIPTIONS[kind], "parameters": parameters}
    )


def call_fields(kind: ToolKind, arguments: str) -> Json:
    """Return a call item's fields. Missing or mistyped arguments become empty."""
    given = _object(arguments)
    match kind:
        case "local_shell":
            action: Json = {
                "type": "exec",
                "command": _words(given.get("command")),
                "env": _texts(given.get("env")),
            }
            action |= (
                _if(given, "timeout_ms", int)
                | _if(given, "working_directory", str)
                | _if(given, "user", str)
            )
            return {"action": action}
        case "shell":
            limits = {"timeout_ms": None, "max_output_length": None}
            limits |= _if(given, "timeout_ms", int) | _if(given, "max_output_length", int)
            return {
                "action": {
                    "commands": _lines(given.get("commands", given.get("command"))),
                    **limits,
                }
            }
        case "apply_patch":
            inner = given.get("operation")
            operation = inner if isinstance(inner, dict) else given
            fields = {
                "type": operation.get("type", "update_file"),
                "path": operation.get("path", ""),
            }
            needs_diff = {} if fields["type"] == "delete_file" else {"diff": ""}
            return {"operation": fields | needs_diff | _if(operation, "diff", str)}
        case "function":
            return {"arguments": arguments}
        case "custom":
            return {"input": arguments}


def arguments_of_item(item: Json) -> Json:
    """Return the model's arguments for a call item; half an object, from a cut answer, as text."""
    match item["type"]:
        case "local_shell_call":
            return {
                name: value
                for name, value in item["action"].items()
                if name != "type" and value not in (None, {})
            }
        case "shell_call":
            return {name: value for name, value in item["action"].items() if value is not None}
        case "apply_patch_call":
            return dict(item["operation"])
        case "custom_tool_call":
            return {"input": item["input"]}
    text = item["arguments"]
    return _decoded(text or "{}", {"arguments": text})


def _object(text: str) -> Json:
    return _decoded(text, {})


def _decoded(text: str, otherwise: Json) -> Json:
    try:
        value: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return otherwise
    return value if isinstance(value, dict) else otherwise


def _words(value: Any) -> list[str]:
    """Return a command as words; a model may write a single shell line."""
    return ["bash", "-lc", value] if isinstance(value, str) else _lines(value)


def _lines(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [
        line if isinstance(line, str) else msgspec.json.encode(line).decode() for line in values
    ]


def _texts(value: Any) -> dict[str, str]:
    return {name: str(text) for name, text in value.items()} if isinstance(value, dict) else {}


def _if(given: Json, name: str, kind: type) -> Json:
    return {name: given[name]} if type(given.get(name)) is kind else {}
