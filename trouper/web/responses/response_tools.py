"""Tools of the responses API: flat fields, more types, more kinds of tool_choice; and shell and
patch tools, of which the API defines the parameters.

The client runs shell and patch tools, which the model sees as functions. Source of the fields: the
`openai` package (local_shell_call, shell_call, apply_patch_call).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from trouper.protocol.problems import bad_request
from trouper.web.http.body_faults import explains, says
from trouper.web.http.body_parsing import decoded_text
from trouper.web.http.field_types import Ignored, Text
from trouper.web.http.leniency import Adapt, Skip
from trouper.web.http.request_body import Body, StrictCheck
from trouper.web.http.request_schema import TEXT, Unsupported
from trouper.web.openai.chat_tools import (
    MAX_TOOLS,
    FreeText,
    FunctionDefinition,
    GrammarDefinition,
    ToolName,
    check_plain_name,
)
from trouper.web.openai.other_servers import known_tools
from trouper.web.output.tool_calls import Tools
from trouper.web.output.tool_forms import Json, ToolForm, ToolKind, ToolOffer, custom_offer

BuiltInKind = Literal["local_shell", "shell", "apply_patch"]
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
    given = _object(arguments, {})
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
    return _object(text or "{}", {"arguments": text})


def _object(text: str, otherwise: Json) -> Json:
    value = decoded_text(text)
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


ALWAYS_LOADED: Unsupported = {
    "defer_loading": (False,),
    "async": (False,),
    "allowed_callers": (["direct"],),
}
"""Parameters of deferred or program-called tools. Here every tool is in the prompt."""


class FlatTool(FunctionDefinition, tag="function", frozen=True):
    """A tool of the client."""

    unknown_may_be_null: ClassVar[bool] = True
    unsupported: ClassVar[Unsupported] = ALWAYS_LOADED


class FlatGrammar(GrammarDefinition, tag="grammar", frozen=True):
    """Text that matches a grammar, which is enforced where the tool is the only one that may be
    called, and described to the model elsewhere."""


class FlatCustomTool(Body, tag="custom", frozen=True):
    """A tool of the client whose input is text."""

    unknown_may_be_null: ClassVar[bool] = True
    unsupported: ClassVar[Unsupported] = ALWAYS_LOADED
    strict_check: ClassVar[StrictCheck | None] = check_plain_name
    name: ToolName
    description: Text | None = None
    format: FreeText | FlatGrammar | None = None

    def offer(self, path: str, namespace: str | None = None) -> ToolOffer:
        grammar = None if self.format is None else self.format.grammar_at(f"{path}.format")
        return custom_offer(ToolForm(self.name, "custom", namespace, grammar), self.description)


def _inner_adapted(value: Json, skip: Skip) -> Json:
    tools = value.get("tools")
    return (
        value | {"tools": known_tools(tools, ("function", "custom"), skip)}
        if isinstance(tools, list)
        else value
    )


class NamespaceTool(Body, tag="namespace", frozen=True):
    """Tools of one origin. The model sees each under the joined name; the description stands before
    that of the first."""

    unknown_may_be_null: ClassVar[bool] = True
    adapt: ClassVar[Adapt | None] = _inner_adapted
    strict_check: ClassVar[StrictCheck | None] = check_plain_name
    name: ToolName
    tools: Annotated[
        list[
            Annotated[
                FlatTool | FlatCustomTool, says("{path} must be a tool of type function or custom")
            ]
        ],
        Meta(max_length=MAX_TOOLS),
    ]
    description: Text | None = None


class LocalEnvironment(Body, tag="local", frozen=True):
    """The client's own machine."""

    unsupported: ClassVar[Unsupported] = {"skills": ([],)}


class _BuiltIn(Body, frozen=True):
    unknown_may_be_null: ClassVar[bool] = True
    unsupported: ClassVar[Unsupported] = {"allowed_callers": (["direct"],)}


class LocalShellTool(_BuiltIn, tag="local_shell", frozen=True):
    """Commands that the client runs."""


class ShellTool(_BuiltIn, tag="shell", frozen=True):
    """Commands that the client runs, several at a time."""

    environment: (
        Annotated[LocalEnvironment, says("{path} must be of type local: no container runs here")]
        | None
    ) = None


class ApplyPatchTool(_BuiltIn, tag="apply_patch", frozen=True):
    """Patches that the client applies."""


AnyTool = FlatTool | FlatCustomTool | NamespaceTool | LocalShellTool | ShellTool | ApplyPatchTool
BUILT_IN: dict[type, BuiltInKind] = {
    LocalShellTool: "local_shell",
    ShellTool: "shell",
    ApplyPatchTool: "apply_patch",
}
TOOL_TYPES = ("function", "custom", "namespace", *BUILT_IN.values())


class FlatNamedTool(Body, tag="function", frozen=True):
    """One of the tools."""

    name: str
    namespace: Ignored = None


class FlatNamedCustom(Body, tag="custom", frozen=True):
    """One of the custom tools."""

    name: str
    namespace: Ignored = None


class LocalShellChoice(Body, tag="local_shell", frozen=True):
    """The shell."""


class ShellChoice(Body, tag="shell", frozen=True):
    """The shell."""


class ApplyPatchChoice(Body, tag="apply_patch", frozen=True):
    """The patches."""


Named = FlatNamedTool | FlatNamedCustom | LocalShellChoice | ShellChoice | ApplyPatchChoice
CHOSEN: dict[type, ToolKind] = {
    LocalShellChoice: "local_shell",
    ShellChoice: "shell",
    ApplyPatchChoice: "apply_patch",
}
NAMED_TYPES = ("function", "custom", *CHOSEN.values())


def explain_named(value: Any, path: str) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in CHOSEN.values():
        return
    raise bad_request(f"{path} must be of type function and have a name", path, "invalid_value")


def _allowed_adapted(value: Json, skip: Skip) -> Json:
    """Drop tools that run elsewhere, unless no other is allowed."""
    tools = value.get("tools")
    if not isinstance(tools, list):
        return value
    return value | {"tools": known_tools(tools, NAMED_TYPES, skip) or tools}


class AllowedTools(Body, tag="allowed_tools", frozen=True):
    """The tools that may be called, or of which one must be."""

    adapt: ClassVar[Adapt | None] = _allowed_adapted
    mode: Annotated[Literal["auto", "required"], says("{path} must be auto or required")]
    tools: Annotated[
        list[Annotated[Named, explains(explain_named)]],
        says(
            f"{{path}} must be an array of 1 to {MAX_TOOLS} tools",
            min_length=1,
            max_length=MAX_TOOLS,
        ),
    ]


def explain_choice(value: Any, path: str) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("function", "custom"):
        raise bad_request(f"{path} must be of type {kind} and have a name", path, "invalid_value")
    if kind not in ("allowed_tools", *CHOSEN.values()):
        message = (
            f"{path} must be none, auto, required, or an object of type function or allowed_tools"
        )
        raise bad_request(message, path, "invalid_value")


NOT_RUN_HERE = (
    "{path}: no tool of type {tag!r} is run here, only the client's own; turn it off in the client"
)
FlatTools = Annotated[
    list[Annotated[AnyTool, says(NOT_RUN_HERE, "unsupported_tool", ".type")]],
    Meta(max_length=MAX_TOOLS),
]
FlatToolChoice = Annotated[
    Literal["none", "auto", "required"]
    | FlatNamedTool
    | FlatNamedCustom
    | LocalShellChoice
    | ShellChoice
    | ApplyPatchChoice
    | AllowedTools,
    explains(explain_choice),
]


def is_hosted(tool: object) -> bool:
    """Whether a known tool would run on the server, as a shell in a container."""
    environment = (
        tool.get("environment") if isinstance(tool, dict) and tool.get("type") == "shell" else None
    )
    return isinstance(environment, dict) and environment.get("type") not in (None, "local")


def tools_of(
    tools: Sequence[AnyTool] | None, choice: str | Named | AllowedTools | None, *, several: bool
) -> Tools:
    """Return the offered and the forced tools. Raises `RequestFailed` (400) naming the
    parameter."""
    offers = [
        offer for index, tool in enumerate(tools or ()) for offer in _offers(tool, f"tools.{index}")
    ]
    offered = Tools.of(offers, several=several)
    if choice is None or choice == "auto":
        return offered
    if choice == "none":
        return Tools()
    if isinstance(choice, str) or not offered.offered:
        return offered.requiring()
    if isinstance(choice, AllowedTools):
        named = [
            _named(tool, offered, f"tool_choice.tools.{index}")
            for index, tool in enumerate(choice.tools)
        ]
        return offered.restricted(named) if choice.mode == "auto" else offered.requiring(named)
    return offered.requiring([_named(choice, offered, "tool_choice")])


def _offers(tool: AnyTool, path: str) -> list[ToolOffer]:
    if isinstance(tool, NamespaceTool):
        paths = (f"{path}.tools.{index}" for index in range(len(tool.tools)))
        offers = [inner.offer(at, tool.name) for at, inner in zip(paths, tool.tools, strict=True)]
        return (
            offers
            if tool.description is None or not offers
            else [offers[0].after(tool.description), *offers[1:]]
        )
    if isinstance(tool, FlatTool | FlatCustomTool):
        return [tool.offer(path)]
    return [built_in_offer(BUILT_IN[type(tool)])]


def _named(choice: Named, offered: Tools, path: str) -> Json:
    if isinstance(choice, FlatNamedTool):
        return offered.named(choice.name, path, "function")
    if isinstance(choice, FlatNamedCustom):
        return offered.named(choice.name, path, "custom")
    kind = CHOSEN[type(choice)]
    return offered.named(kind, path, kind)
