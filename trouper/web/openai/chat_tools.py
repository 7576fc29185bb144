"""Tools in chat requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from trouper.protocol.grammar import MAX_SOURCE, Grammar
from trouper.protocol.problems import bad_request
from trouper.web.http.body_faults import explains, says
from trouper.web.http.body_parsing import decoded_text
from trouper.web.http.field_types import Flag, Ignored, JsonText, Text
from trouper.web.http.leniency import Adapt, Skip
from trouper.web.http.request_body import Body, StrictCheck
from trouper.web.output.tool_calls import Tools
from trouper.web.output.tool_forms import INPUT, ToolForm, ToolOffer, custom_offer

MAX_TOOLS = 1024
MAX_NAME = 256
Json = dict[str, Any]


def tool_name(longest: int) -> Meta:
    strictly = {"pattern": f"^[A-Za-z0-9_.-]{{1,{longest}}}$"}
    meaning = f"{{path}} must be 1 to {MAX_NAME} characters"
    return says(meaning, min_length=1, max_length=MAX_NAME, extra_json_schema=strictly)


ToolName = Annotated[str, tool_name(64)]
Arguments = Annotated[
    dict[str, Any],
    says(
        "{path} must be a JSON Schema", "invalid_type", description="JSON Schema of the arguments."
    ),
]


def plain_name(plain: re.Pattern[str], longest: int) -> StrictCheck:
    """Return a check of tools' names, by which the API refuses others (400)."""

    def check(value: Json, path: str) -> None:
        name = value.get("name")
        if isinstance(name, str) and not plain.fullmatch(name):
            path = f"{path}.name"
            message = f"{path} must be 1 to {longest} letters, digits, '_', '-' or '.'"
            raise bad_request(message, path, "invalid_value")

    return check


check_plain_name = plain_name(re.compile(r"[A-Za-z0-9_.-]{1,64}"), 64)


class FunctionDefinition(Body, frozen=True):
    """A function that the model may call."""

    strict_check: ClassVar[StrictCheck | None] = check_plain_name
    name: ToolName
    description: Text | None = None
    parameters: Arguments | None = None
    strict: Flag | None = None

    def offer(self, path: str, namespace: str | None = None) -> ToolOffer:
        fields = {
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }
        given = {key: value for key, value in fields.items() if value is not None}
        form = ToolForm(self.name, namespace=namespace)
        return ToolOffer(form, given, param=f"{path}.parameters", strict=bool(self.strict))


def _nested(value: Json, _: Skip) -> Json:
    """Read a tool in the flat form of the responses API."""
    if "function" in value or not isinstance(value.get("name"), str):
        return value
    inner = {
        name: value[name]
        for name in ("name", "description", "parameters", "strict")
        if name in value
    }
    return {name: given for name, given in value.items() if name not in inner} | {"function": inner}


class FunctionTool(Body, tag="function", frozen=True):
    """A tool of the client."""

    may_lack_tag: ClassVar[bool] = True
    adapt: ClassVar[Adapt | None] = _nested
    function: FunctionDefinition
    cache_control: Ignored = None

    def offer(self, path: str) -> ToolOffer:
        return self.function.offer(f"{path}.function")


class FreeText(Body, tag="text", frozen=True):
    """Any text."""

    def grammar_at(self, _: str) -> Grammar | None:
        return None


class GrammarDefinition(Body, frozen=True):
    syntax: Annotated[Literal["lark", "regex"], says("{path} must be lark or regex")]
    definition: Annotated[
        str, says(f"{{path}} may have {MAX_SOURCE} characters", max_length=MAX_SOURCE)
    ]

    def grammar_at(self, path: str) -> Grammar:
        return Grammar(self.syntax, self.definition, f"{path}.definition")


class GrammarFormat(Body, tag="grammar", frozen=True):
    """Text that matches a grammar, enforced where the tool is the only one that may be called, and
    described to the model elsewhere."""

    inner: GrammarDefinition = msgspec.field(name="grammar")

    def grammar_at(self, path: str) -> Grammar:
        return self.inner.grammar_at(f"{path}.grammar")


class CustomDefinition(Body, frozen=True):
    """A tool whose input is text."""

    strict_check: ClassVar[StrictCheck | None] = check_plain_name
    name: ToolName
    description: Text | None = None
    format: FreeText | GrammarFormat | None = None


class ChatCustomTool(Body, tag="custom", frozen=True):
    """A tool of the client whose input is text."""

    custom: CustomDefinition

    def offer(self, path: str) -> ToolOffer:
        written = self.custom.format
        grammar = None if written is None else written.grammar_at(f"{path}.custom.format")
        return custom_offer(
            ToolForm(self.custom.name, "custom", grammar=grammar), self.custom.description
        )


class FunctionName(Body, frozen=True):
    name: str


class NamedTool(Body, tag="function", frozen=True):
    """The tool that must be called."""

    function: FunctionName


def arguments_adapted(value: Json, skip: Skip) -> Json:
    """One malformed call must not fail every later request of a conversation."""
    given = value.get("arguments")
    if not isinstance(given, str) or not given or isinstance(decoded_text(given), dict):
        return value
    try:
        text = msgspec.json.encode({"arguments": given}).decode()
    except UnicodeEncodeError:
        return value
    skip("arguments")
    return value | {"arguments": text}


class CalledFunction(Body, frozen=True):
    adapt: ClassVar[Adapt | None] = arguments_adapted
    name: str
    arguments: (
        Annotated[
            JsonText | dict[str, Any],
            says("{path} must be JSON, as text, not {type}", "invalid_type"),
        ]
        | None
    ) = None


class PastCall(Body, tag="function", frozen=True):
    """A call of an earlier answer."""

    may_lack_tag: ClassVar[bool] = True
    function: CalledFunction
    id: str | None = None
    index: Ignored = None


class CalledCustom(Body, frozen=True):
    name: str
    input: Text


class PastCustomCall(Body, tag="custom", frozen=True):
    """A call of an earlier answer, of a custom tool."""

    custom: CalledCustom
    id: str | None = None
    index: Ignored = None


class CustomName(Body, frozen=True):
    name: str


class NamedCustomTool(Body, tag="custom", frozen=True):
    """The custom tool that must be called."""

    custom: CustomName


class AllowedChoice(Body, frozen=True):
    mode: Annotated[Literal["auto", "required"], says("{path} must be auto or required")]
    tools: Annotated[
        list[NamedTool | NamedCustomTool],
        says(
            f"{{path}} must be an array of 1 to {MAX_TOOLS} tools",
            min_length=1,
            max_length=MAX_TOOLS,
        ),
    ]


class AllowedChatTools(Body, tag="allowed_tools", frozen=True):
    """The tools that may be called, or of which one must be."""

    allowed_tools: AllowedChoice


def explain_choice(_: Any, path: str) -> None:
    message = f"{path} must be none, auto, required, or name one of the tools"
    raise bad_request(message, path, "invalid_value")


ChatTools = Annotated[
    list[
        Annotated[
            FunctionTool | ChatCustomTool,
            says("{path} must be an object of type function or custom", "invalid_type"),
        ]
    ],
    Meta(max_length=MAX_TOOLS),
]
Named = NamedTool | NamedCustomTool
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedChatTools,
    explains(explain_choice),
]
PastCalls = list[
    Annotated[
        PastCall | PastCustomCall,
        says("{path} must be an object of type function or custom", "invalid_type"),
    ]
]


def tools_of(
    tools: Sequence[FunctionTool | ChatCustomTool] | None,
    choice: str | Named | AllowedChatTools | None,
    parallel: bool | None,
) -> Tools:
    """Offer the tools, restricted or with a call required as the choice says. Raises
    `RequestFailed` (400)."""
    offers = [tool.offer(f"tools.{index}") for index, tool in enumerate(tools or ())]
    offered = Tools.of(offers, several=parallel is not False)
    if choice is None or choice == "auto":
        return offered
    if choice == "none":
        return Tools()
    if isinstance(choice, str) or not offered.offered:
        return offered.requiring()
    if isinstance(choice, AllowedChatTools):
        allowed = choice.allowed_tools
        named = [
            _named(tool, offered, f"tool_choice.allowed_tools.tools.{index}")
            for index, tool in enumerate(allowed.tools)
        ]
        return offered.restricted(named) if allowed.mode == "auto" else offered.requiring(named)
    return offered.requiring([_named(choice, offered, "tool_choice")])


def _named(choice: Named, offered: Tools, path: str) -> Json:
    if isinstance(choice, NamedCustomTool):
        return offered.named(choice.custom.name, path, "custom")
    return offered.named(choice.function.name, path, "function")


def past_calls(calls: Sequence[PastCall | PastCustomCall], path: str, tools: Tools) -> list[Json]:
    return [
        {
            "id": call.id or "",
            "type": "function",
            "function": _past_function(call, f"{path}.{index}", tools),
        }
        for index, call in enumerate(calls)
    ]


def _past_function(call: PastCall | PastCustomCall, path: str, tools: Tools) -> Json:
    if isinstance(call, PastCustomCall):
        name = tools.called(ToolForm(call.custom.name, "custom"))
        return {"name": name, "arguments": {INPUT: call.custom.input}}
    arguments = arguments_of(call.function.arguments, f"{path}.function.arguments")
    return {"name": tools.called(ToolForm(call.function.name)), "arguments": arguments}


def arguments_of(value: str | Json | None, path: str) -> Json:
    """Raises `RequestFailed` (400)."""
    if not isinstance(value, str):
        return value or {}
    parsed = decoded_text(value or "{}")
    if not isinstance(parsed, dict):
        raise bad_request(f"{path} must be the JSON of an object", path, "invalid_json_text")
    return parsed
