"""Tools of the responses API: written flat, and with more kinds of tool_choice."""

from __future__ import annotations

from typing import Any

from trouper.protocol.problems import bad_request
from trouper.web.http.body_parsing import combination, only
from trouper.web.http.request_schema import Refused, among
from trouper.web.openai.chat_tools import MAX_TOOLS, function_tool, offered_tools
from trouper.web.output.dialect import Json
from trouper.web.output.tool_calls import Tools

TOOL_NEUTRAL: Refused = {"defer_loading": (False,), "async": (False,), "allowed_callers": (["direct"],)}


def tools_of(tools: Any, choice: Any, *, several: bool) -> Tools:
    """Parse the tools. Raises `RequestFailed` (400) naming the parameter."""
    offered = () if tools is None else offered_tools(tools, _flat_tool)
    if choice is None or choice == "auto":
        return Tools(offered, (), several)
    if choice == "none":
        return Tools()
    if not offered:
        raise combination("tool_choice needs tools", "tool_choice")
    if choice == "required":
        return Tools(offered, offered, several)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return Tools(offered, (_named(choice, offered, "tool_choice"),), several)
    if kind == "allowed_tools":
        return _allowed(choice, offered, several)
    message = "tool_choice must be none, auto, required, or an object of type function or allowed_tools"
    raise bad_request(message, "tool_choice", "invalid_value")


def _flat_tool(tool: Any, path: str) -> Json:
    """Return a tool as templates expect it: the fields beside `type` here stand below `function` there."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        message = f"{path}: only tools of type function are supported here, not {kind!r}; turn it off in the client"
        raise bad_request(message, f"{path}.type", "unsupported_tool")
    function = {
        name: value
        for name, value in tool.items()
        if name != "type" and value is not None and not among(value, TOOL_NEUTRAL.get(name, ()))
    }
    return function_tool(function, path)


def _named(choice: Any, offered: tuple[Json, ...], path: str) -> Json:
    name = choice.get("name") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(name, str):
        raise bad_request(f"{path} must be of type function and have a name", path, "invalid_value")
    only(choice, {"type", "name"}, path)
    for tool in offered:
        if tool["function"]["name"] == name:
            return tool
    raise combination(f"{path} names {name!r}, which is not among the tools", path)


def _allowed(choice: Json, offered: tuple[Json, ...], several: bool) -> Tools:
    """Return the tools of `allowed_tools`. With `auto` the model sees no others; with `required` the grammar excludes
    them."""
    only(choice, {"type", "mode", "tools"}, "tool_choice")
    mode, names = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise bad_request("tool_choice.mode must be auto or required", "tool_choice.mode", "invalid_value")
    if not isinstance(names, list) or not 0 < len(names) <= MAX_TOOLS:
        message = f"tool_choice.tools must be an array of 1 to {MAX_TOOLS} tools"
        raise bad_request(message, "tool_choice.tools", "invalid_value")
    allowed = tuple(_named(name, offered, f"tool_choice.tools.{index}") for index, name in enumerate(names))
    return Tools(allowed, (), several) if mode == "auto" else Tools(offered, allowed, several)
