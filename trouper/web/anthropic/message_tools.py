"""Tools in messages requests: the client's own, those with inputs that Anthropic's documentation
defines (bash, text editor, memory), and in lenient readings those in OpenAI's format. Tools of
Anthropic's servers are skipped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from trouper.protocol.problems import bad_request
from trouper.web.http.body_faults import explains, says
from trouper.web.http.field_types import Ignored, String, Text
from trouper.web.http.leniency import Adapt, Skip, safe_name
from trouper.web.http.request_body import Body, StrictCheck
from trouper.web.http.request_schema import TEXT, Json, Unsupported
from trouper.web.openai.chat_tools import MAX_TOOLS, plain_name, tool_name
from trouper.web.openai.other_servers import CHOICES
from trouper.web.output.tool_calls import Tools
from trouper.web.output.tool_forms import ToolForm, ToolOffer

PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
AN_OBJECT: Json = {
    "properties": {"type": {"const": "object"}},
    "anyOf": [{"required": ["type"]}, {"required": ["$ref"]}],
}
NOT_AN_OBJECT = "{path} must be a JSON Schema of type object"
InputSchema = Annotated[
    dict[str, Any],
    says(
        NOT_AN_OBJECT,
        "invalid_type",
        extra_json_schema=AN_OBJECT,
        description=(
            "JSON Schema of the input: of type object, or a reference, as recursive classes have "
            "at their root."
        ),
    ),
]


def _tool_adapted(value: Json, _: Skip) -> Json:
    schema = value.get("input_schema")
    if not isinstance(schema, dict) or "type" in schema or "$ref" in schema:
        return value
    return value | {"input_schema": {"type": "object", **schema}}


class CustomTool(Body, tag="custom", frozen=True):
    """A tool of the client. A forced call follows its schema with or without `strict`."""

    may_lack_tag: ClassVar[bool] = True
    unknown_may_be_null: ClassVar[bool] = True
    adapt: ClassVar[Adapt | None] = _tool_adapted
    unsupported: ClassVar[Unsupported] = {
        "allowed_callers": (["direct"],),
        "input_examples": ([],),
    }
    strict_check: ClassVar[StrictCheck | None] = plain_name(PLAIN_NAME, 128)
    name: Annotated[str, tool_name(128)]
    input_schema: InputSchema
    description: Text | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None

    def offer(self, path: str) -> ToolOffer:
        """Raises `RequestFailed` (400)."""
        path = f"{path}.input_schema"
        if not _takes_an_object(self.input_schema):
            raise bad_request(NOT_AN_OBJECT.format(path=path), path, "invalid_type")
        described = {} if self.description is None else {"description": self.description}
        return ToolOffer(
            ToolForm(self.name),
            {**described, "parameters": self.input_schema},
            bool(self.defer_loading),
            path,
            strict=bool(self.strict),
        )


def _takes_an_object(schema: Json) -> bool:
    """Recursive pydantic models have a reference without a type at the root."""
    return bool(schema["type"] == "object") if "type" in schema else "$ref" in schema


class _Choice(Body, frozen=True):
    disable_parallel_tool_use: bool | None = None


class AutoChoice(_Choice, tag="auto", frozen=True):
    """The model decides."""


class AnyChoice(_Choice, tag="any", frozen=True):
    """One of the tools must be called."""


class ToolNameChoice(_Choice, tag="tool", kw_only=True, frozen=True):
    """This tool must be called."""

    name: String


class NoneChoice(Body, tag="none", frozen=True):
    """No tool may be called."""


def explain_tool(value: Any, path: str) -> None:
    if isinstance(value, dict) and value.get("type") not in (None, "custom"):
        message = (
            f"{path}.type: tools of type {value['type']!r} are not supported here, only your own "
            "(custom)"
        )
        raise bad_request(message, f"{path}.type", "unsupported_parameter")


ToolChoiceObject = Annotated[
    AutoChoice | AnyChoice | ToolNameChoice | NoneChoice,
    says("{path} must be an object of type auto, any, tool, none"),
]
CustomTools = Annotated[
    list[Annotated[CustomTool, explains(explain_tool)]], Meta(max_length=MAX_TOOLS)
]


def tools_of(tools: Sequence[CustomTool] | None, choice: ToolChoiceObject | None) -> Tools:
    """Offer the tools as `choice` says. Raises `RequestFailed` (400)."""
    offered = Tools.of(
        [tool.offer(f"tools.{index}") for index, tool in enumerate(tools or ())],
        several=isinstance(choice, NoneChoice)
        or choice is None
        or not choice.disable_parallel_tool_use,
    )
    if isinstance(choice, NoneChoice):
        return Tools()
    if choice is None or isinstance(choice, AutoChoice):
        return offered
    if isinstance(choice, AnyChoice) or not offered.offered:
        return offered.requiring()
    return offered.requiring([offered.named(choice.name, "tool_choice.name")])


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
    """Give a client's tool the API's inputs, read OpenAI's form, or skip a server's tool (None)."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind == "custom":
        return tool
    function = tool.get("function") or tool
    if kind == "function" and isinstance(function, dict) and isinstance(function.get("name"), str):
        return _of_openai(function)
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
