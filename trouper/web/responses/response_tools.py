"""Tools of the responses API: written flat, and with more kinds of tool_choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from trouper.protocol.problems import bad_request
from trouper.web.http.body_faults import explains, says
from trouper.web.http.body_parsing import combination
from trouper.web.http.request_body import Body
from trouper.web.http.request_schema import Refused
from trouper.web.openai.chat_tools import MAX_TOOLS, FunctionDefinition, named_tool, offered_tools
from trouper.web.output.dialect import Json
from trouper.web.output.tool_calls import Tools


class FlatTool(FunctionDefinition, tag="function", frozen=True):
    """A tool of the client."""

    unknown_may_be_null: ClassVar[bool] = True
    refused: ClassVar[Refused] = {"defer_loading": (False,), "async": (False,), "allowed_callers": (["direct"],)}


class FlatNamedTool(Body, tag="function", frozen=True):
    """One of the tools."""

    name: str


def explain_named(_: Any, path: str) -> None:
    raise bad_request(f"{path} must be of type function and have a name", path, "invalid_value")


class AllowedTools(Body, tag="allowed_tools", frozen=True):
    """The tools that may be called, or of which one must be."""

    mode: Annotated[Literal["auto", "required"], says("{path} must be auto or required")]
    tools: Annotated[
        list[Annotated[FlatNamedTool, explains(explain_named)]],
        says(f"{{path}} must be an array of 1 to {MAX_TOOLS} tools", min_length=1, max_length=MAX_TOOLS),
    ]


def explain_choice(value: Any, path: str) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function":
        explain_named(value, path)
    if kind != "allowed_tools":
        message = f"{path} must be none, auto, required, or an object of type function or allowed_tools"
        raise bad_request(message, path, "invalid_value")


ONLY_FUNCTIONS = "{path}: only tools of type function are supported here, not {tag!r}; turn it off in the client"
FlatTools = Annotated[
    list[Annotated[FlatTool, says(ONLY_FUNCTIONS, "unsupported_tool", ".type")]], Meta(max_length=MAX_TOOLS)
]
FlatToolChoice = Annotated[Literal["none", "auto", "required"] | FlatNamedTool | AllowedTools, explains(explain_choice)]


def tools_of(
    tools: Sequence[FlatTool] | None, choice: str | FlatNamedTool | AllowedTools | None, *, several: bool
) -> Tools:
    """Return the offered and the forced tools. Raises `RequestFailed` (400) naming the parameter."""
    offered = offered_tools([tool.for_template() for tool in tools or ()])
    if choice is None or choice == "auto":
        return Tools(offered, (), several)
    if choice == "none":
        return Tools()
    if not offered:
        raise combination("tool_choice needs tools", "tool_choice")
    if isinstance(choice, FlatNamedTool):
        return Tools(offered, (named_tool(choice.name, offered, "tool_choice"),), several)
    if isinstance(choice, AllowedTools):
        return _allowed(choice, offered, several)
    return Tools(offered, offered, several)


def _allowed(choice: AllowedTools, offered: tuple[Json, ...], several: bool) -> Tools:
    """Return the tools of `allowed_tools`. With `auto` the model sees no others; with `required` the grammar excludes
    them."""
    allowed = tuple(
        named_tool(tool.name, offered, f"tool_choice.tools.{index}") for index, tool in enumerate(choice.tools)
    )
    return Tools(allowed, (), several) if choice.mode == "auto" else Tools(offered, allowed, several)
