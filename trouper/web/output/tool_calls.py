"""Tools of a chat request: the offered tools, and whether a call is required.

A tool is written as OpenAI's chat API has it, which is what templates and parsers of calls expect:
{"type": "function", "function": {"name", "description", "parameters"}}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import msgspec

from trouper.protocol.grammar import Grammar
from trouper.protocol.problems import bad_request
from trouper.web.http.body_parsing import combination
from trouper.web.output.schema_references import (
    ReferenceUnknown,
    fragment_of,
    has_references,
    moved,
)
from trouper.web.output.tool_forms import ToolForm, ToolKind, ToolOffer, model_names

Json = dict[str, Any]


@attrs.frozen
class Tools:
    """The tools of a request. `forced`: the answer must be a call of one of these, which its
    grammar guarantees."""

    offered: tuple[Json, ...] = ()
    forced: tuple[Json, ...] = ()
    several: bool = True
    """Whether an answer may have more than one call."""
    forms: Mapping[str, ToolForm] = attrs.field(factory=dict)
    """What clients call the tools, by the model's names; of those that are not functions with the
    same name."""
    deferred: frozenset[str] = frozenset()
    """The model's names of tools that may be called, and are described where the conversation names
    them and not at its beginning: a client that loads tools one by one keeps the prefix of its
    prompt."""

    @classmethod
    def of(cls, offers: Sequence[ToolOffer], *, several: bool = True) -> Tools:
        """Offer tools. Raises `RequestFailed` (400) if two of them have one name."""
        forms = [offer.form for offer in offers]
        if len(set(forms)) != len(forms):
            raise combination("tools: two of them have the same name", "tools")
        names = model_names(forms)
        offered = tuple(offer.as_function(name) for offer, name in zip(offers, names, strict=True))
        mapped = {
            name: form for name, form in zip(names, forms, strict=True) if form != ToolForm(name)
        }
        deferred = frozenset(
            name for offer, name in zip(offers, names, strict=True) if offer.deferred
        )
        return cls(offered, several=several, forms=mapped, deferred=deferred)

    @property
    def described(self) -> list[Json]:
        """The tools for the chat template."""
        return [tool for tool in self.offered if tool["function"]["name"] not in self.deferred]

    def form(self, name: str) -> ToolForm:
        """Return what the client calls the tool that the model calls `name`."""
        return self.forms.get(name) or ToolForm(name)

    def called(self, form: ToolForm) -> str:
        """Return what the model calls the tool of an earlier call, offered or not."""
        return next(
            (name for name, mapped in self.forms.items() if mapped == form), form.model_name
        )

    def named(self, name: str, path: str, kind: ToolKind | None = None) -> Json:
        """Return the offered tool of a name, which the parameter at `path` requests. Raises
        `RequestFailed` (400)."""
        for tool in self.offered:
            own: str = tool["function"]["name"]
            form = self.form(own)
            if name in (form.name, own) and kind in (None, form.kind):
                return tool
        raise combination(f"{path} names {name!r}, which is not among the tools", path)

    def requiring(self, forced: Sequence[Json] | None = None) -> Tools:
        """Return the tools of which one must be called: these, or any. Raises `RequestFailed`
        (400)."""
        if not self.offered:
            raise combination(
                "tool_choice needs tools, and none that can be called is offered", "tool_choice"
            )
        return attrs.evolve(self, forced=self.offered if forced is None else tuple(forced))

    def restricted(self, allowed: Sequence[Json]) -> Tools:
        """Return the tools without those that may not be called: the model sees no others."""
        return attrs.evolve(self, offered=tuple(allowed))

    @property
    def freeform(self) -> str | None:
        """The model's name of a custom tool whose input the answer as a whole must be: the only
        forced one, with a grammar."""
        if len(self.forced) != 1:
            return None
        name: str = self.forced[0]["function"]["name"]
        return None if self.form(name).grammar is None else name

    @property
    def grammar(self) -> Grammar | None:
        if not self.forced:
            return None
        if self.freeform is not None:
            return self.form(self.freeform).grammar
        definitions: Json = {}
        schemas = [_call_schema(tool["function"], definitions) for tool in self.forced]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        schema |= {"$defs": definitions} if definitions else {}
        return Grammar("json_schema", msgspec.json.encode(schema).decode(), "tools")


NO_TOOLS = Tools()


def _call_schema(function: Json, definitions: Json) -> Json:
    """Return the schema of a call of this function. Parameters with references are put into
    `definitions`, under the function's name."""
    name, parameters = function["name"], function.get("parameters") or {"type": "object"}
    if has_references(msgspec.json.encode(parameters)):
        location = ("$defs", name)
        try:
            definitions[name] = moved(parameters, location)
        except ReferenceUnknown as error:
            raise bad_request(
                f"tools: the parameters of {name!r} cannot be followed: {error}",
                "tools",
                "invalid_grammar",
            ) from None
        parameters = {"$ref": fragment_of(location)}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
