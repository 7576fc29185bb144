"""Tools of a chat request, in the form of OpenAI's chat API, which templates and parsers expect:
{"type": "function", "function": {"name", "description", "parameters"}}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import msgspec

from trouper.protocol.grammar import CallSchema, Grammar
from trouper.protocol.problems import bad_request
from trouper.web.http.body_parsing import combination
from trouper.web.output.schema_references import (
    ReferenceUnknown,
    has_references,
    resolved,
)
from trouper.web.output.tool_forms import ToolForm, ToolKind, ToolOffer, model_names

Json = dict[str, Any]


@attrs.frozen
class Tools:
    """`forced`: the answer must be a call of one of these, by grammar."""

    offered: tuple[Json, ...] = ()
    forced: tuple[Json, ...] = ()
    several: bool = True
    forms: Mapping[str, ToolForm] = attrs.field(factory=dict)
    """Clients' forms by the model's names, where the two differ."""
    deferred: frozenset[str] = frozenset()
    """Names of tools that the prompt describes only where the conversation names one, which keeps
    the prompt's prefix."""
    offers: Mapping[str, ToolOffer] = attrs.field(factory=dict)
    """Offers of clients, by the model's names."""

    @classmethod
    def of(cls, offers: Sequence[ToolOffer], *, several: bool = True) -> Tools:
        """Offer tools. Raises `RequestFailed` (400) for a name used twice."""
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
        offers_by_name = dict(zip(names, offers, strict=True))
        return cls(offered, several=several, forms=mapped, deferred=deferred, offers=offers_by_name)

    @property
    def described(self) -> list[Json]:
        return [tool for tool in self.offered if tool["function"]["name"] not in self.deferred]

    def form(self, name: str) -> ToolForm:
        return self.forms.get(name) or ToolForm(name)

    def called(self, form: ToolForm) -> str:
        """Return the model's name of an earlier call's tool, offered or not."""
        return next(
            (name for name, mapped in self.forms.items() if mapped == form), form.model_name
        )

    def named(self, name: str, path: str, kind: ToolKind | None = None) -> Json:
        """Return the offered tool that the parameter at `path` names. Raises `RequestFailed`
        (400)."""
        for tool in self.offered:
            own: str = tool["function"]["name"]
            form = self.form(own)
            if name in (form.name, own) and kind in (None, form.kind):
                return tool
        raise combination(f"{path} names {name!r}, which is not among the tools", path)

    def requiring(self, forced: Sequence[Json] | None = None) -> Tools:
        """Return the tools with a call required, of `forced` or of any. Raises `RequestFailed`
        (400)."""
        if not self.offered:
            raise combination(
                "tool_choice needs tools, and none that can be called is offered", "tool_choice"
            )
        return attrs.evolve(self, forced=self.offered if forced is None else tuple(forced))

    def restricted(self, allowed: Sequence[Json]) -> Tools:
        """The model sees no other tools."""
        return attrs.evolve(self, offered=tuple(allowed))

    @property
    def freeform(self) -> str | None:
        """Name of the only forced tool, if custom and with a grammar."""
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
        calls = [self._call_schema(tool["function"]) for tool in self.forced]
        return Grammar("calls", msgspec.json.encode(calls).decode(), "tools", strict=False)

    def _call_schema(self, function: Json) -> CallSchema:
        """Raises `RequestFailed` (400) for a reference to nothing."""
        name, parameters = function["name"], function.get("parameters") or {}
        offer = self.offers.get(name)
        param = "tools" if offer is None else offer.param
        if has_references(msgspec.json.encode(parameters)):
            try:
                parameters = resolved(parameters)
            except ReferenceUnknown as error:
                message = f"{param}: the parameters of {name!r} cannot be followed: {error}"
                raise bad_request(message, param, "invalid_grammar") from None
        if "type" not in parameters:  # Arguments are an object, whatever else is said of them.
            parameters = parameters | {"type": "object"}
        strict = offer is not None and offer.strict
        return {"name": name, "parameters": parameters, "param": param, "strict": strict}


NO_TOOLS = Tools()
