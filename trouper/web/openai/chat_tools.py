"""Tools in chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from trouper.protocol.problems import bad_request
from trouper.web.http.body_faults import explains, says
from trouper.web.http.body_parsing import combination
from trouper.web.http.field_types import Flag, Ignored, JsonText, Text
from trouper.web.http.leniency import Adapt, Skip
from trouper.web.http.request_body import Body
from trouper.web.output.tool_calls import Tools

MAX_TOOLS = 128
Json = dict[str, Any]
ToolName = Annotated[
    str,
    # Python's $ also matches before a newline at the end.
    says("{path} must be 1 to 64 letters, digits, '_', '-' or '.'", pattern=r"^[A-Za-z0-9_.-]{1,64}$(?!\n)"),
]
Arguments = Annotated[
    dict[str, Any], says("{path} must be a JSON Schema", "invalid_type", description="JSON Schema of the arguments.")
]


class FunctionDefinition(Body, frozen=True):
    """A function that the model may call."""

    name: ToolName
    description: Text | None = None
    parameters: Arguments | None = None
    strict: Flag | None = None

    def for_template(self) -> Json:
        """Return the tool as templates expect it."""
        fields = {"name": self.name, "description": self.description, "parameters": self.parameters}
        given = fields | {"strict": self.strict}
        return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


class FunctionTool(Body, tag="function", frozen=True):
    """A tool of the client."""

    function: FunctionDefinition
    cache_control: Ignored = None


class FunctionName(Body, frozen=True):
    name: str


class NamedTool(Body, tag="function", frozen=True):
    """The tool that must be called."""

    function: FunctionName


def arguments_adapted(value: Json, skip: Skip) -> Json:
    """Convert arguments of an earlier call that are no JSON object, as models write them now and then: the template gets
    their text. Otherwise one bad call would make every later request of its conversation fail."""
    given = value.get("arguments")
    if not isinstance(given, str) or not given or isinstance(_decoded(given), dict):
        return value
    try:
        text = msgspec.json.encode({"arguments": given}).decode()
    except UnicodeEncodeError:
        return value
    skip("arguments")
    return value | {"arguments": text}


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None


class CalledFunction(Body, frozen=True):
    adapt: ClassVar[Adapt | None] = arguments_adapted
    name: str
    arguments: (
        Annotated[JsonText | dict[str, Any], says("{path} must be JSON, as text, not {type}", "invalid_type")] | None
    ) = None


def explain_called(value: Any, path: str) -> None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise bad_request(f"{path} must have a name", path, "invalid_type")


class PastCall(Body, tag="function", frozen=True):
    """A call of an earlier answer."""

    may_lack_tag: ClassVar[bool] = True
    function: Annotated[CalledFunction, explains(explain_called)]
    id: str | None = None
    index: Ignored = None


def explain_choice(_: Any, path: str) -> None:
    message = f"{path} must be none, auto, required, or name one of the tools"
    raise bad_request(message, path, "invalid_value")


FunctionTools = Annotated[
    list[Annotated[FunctionTool, says("{path} must be an object of type function", "invalid_type")]],
    Meta(max_length=MAX_TOOLS),
]
ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool, explains(explain_choice)]
PastCalls = list[Annotated[PastCall, says("{path} must be an object of type function", "invalid_type")]]


def tools_of(tools: Sequence[FunctionTool] | None, choice: str | NamedTool | None, parallel: bool | None) -> Tools:
    """Return the offered and the forced tools. Raises `RequestFailed` (400) naming the parameter."""
    offered = offered_tools([tool.function.for_template() for tool in tools or ()])
    parallel = parallel is not False
    if choice is None or choice == "auto":
        return Tools(offered, (), parallel)
    if choice == "none":
        return Tools()
    if not offered:
        raise combination("tool_choice needs tools", "tool_choice")
    if isinstance(choice, str):
        return Tools(offered, offered, parallel)
    return Tools(offered, (named_tool(choice.function.name, offered, "tool_choice"),), parallel)


def offered_tools(tools: Sequence[Json]) -> tuple[Json, ...]:
    """Check that no two tools have one name. Raises `RequestFailed` (400)."""
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) != len(names):
        raise combination("tools: two of them have the same name", "tools")
    return tuple(tools)


def named_tool(name: str, offered: Sequence[Json], path: str) -> Json:
    """Return the tool of a name, which the parameter at `path` requests. Raises `RequestFailed` (400)."""
    for tool in offered:
        if tool["function"]["name"] == name:
            return tool
    raise combination(f"{path} names {name!r}, which is not among the tools", path)


def past_calls(calls: Sequence[PastCall], path: str) -> list[Json]:
    """Return an assistant message's tool_calls as templates expect them: arguments as an object."""
    return [
        {
            "id": call.id or "",
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": arguments_of(call.function.arguments, f"{path}.{index}.function.arguments"),
            },
        }
        for index, call in enumerate(calls)
    ]


def arguments_of(value: str | Json | None, path: str) -> Json:
    """Return the arguments as an object; an earlier answer had them as text. Raises `RequestFailed` (400)."""
    if not isinstance(value, str):
        return value or {}
    parsed = _decoded(value or "{}")
    if not isinstance(parsed, dict):
        raise bad_request(f"{path} must be the JSON of an object", path, "invalid_json_text")
    return parsed
