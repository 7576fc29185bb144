"""Tools and choices of other servers, for lenient readings. Tools that a server would run are left
out and named."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from trouper.web.http.leniency import Skip, safe_name

Json = dict[str, Any]
CHOICES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


def tools_adapted(value: Json, known: Collection[str], skip: Skip) -> Json:
    """A choice that requires a tool is dropped if no tool remains."""
    tools = value.get("tools")
    if not isinstance(tools, list):
        return value
    kept = known_tools(tools, known, skip)
    if kept or not tools:
        return value | {"tools": kept}
    value = {name: given for name, given in value.items() if name != "tools"}
    if value.get("tool_choice") in ("auto", "none"):
        del value["tool_choice"]
    return value


def known_tools(
    tools: list[Any], known: Collection[str], skip: Skip, name: str = "tools"
) -> list[Any]:
    """A function may lack the type."""
    kept: list[Any] = []
    for tool in tools:
        if not isinstance(tool, dict):
            kept.append(tool)
            continue
        kind = tool.get("type")
        if kind is None and ("function" in tool or "name" in tool or not tool):
            kept.append(tool | {"type": "function"})
        elif kind in known or not isinstance(kind, str | None):
            kept.append(tool)
        else:
            skip(f"{name}.{safe_name(kind or next(iter(tool)))}")
    return kept


def choice_adapted(value: Json, *, nested: bool) -> Json:
    """`nested`: whether the dialect has the name within an object."""
    choice = value.get("tool_choice")
    if isinstance(choice, str):
        return value | {"tool_choice": CHOICES.get(choice, choice)}
    if not isinstance(choice, dict):
        return value
    kind, name = choice.get("type"), choice.get("name")
    if isinstance(kind, str) and kind in CHOICES:
        return value | {"tool_choice": CHOICES[kind]}
    if kind in (None, "tool"):
        kind = "function"
    if kind not in ("function", "custom"):
        return value
    inner = choice.get(kind)
    if name is None and isinstance(inner, dict):
        name = inner.get("name")
    if not isinstance(name, str):
        return value
    rest = {
        key: given
        for key, given in choice.items()
        if key not in ("type", "name", "function", "custom")
    }
    return value | {
        "tool_choice": rest
        | {"type": kind, **({kind: {"name": name}} if nested else {"name": name})}
    }
