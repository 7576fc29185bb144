"""Names of tools, for clients and for the model.

A model knows only functions. Custom tools, namespaces, shells and patches become functions; answers
get the client's names and items back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import attrs

from trouper.protocol.grammar import Grammar

Json = dict[str, Any]
ToolKind = Literal["function", "custom", "local_shell", "shell", "apply_patch"]
UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
SEPARATORS = ("_", ".", "-", "/", ":")
NO_FIELDS: Json = {"type": "object", "properties": {}}
INPUT = "input"
"""Parameter of the function that stands for a custom tool."""


@attrs.frozen
class ToolForm:
    name: str
    kind: ToolKind = "function"
    namespace: str | None = None
    grammar: Grammar | None = attrs.field(default=None, eq=False)

    @property
    def model_name(self) -> str:
        """The model's name, if free: letters, digits, '_', '.' and '-'."""
        joined = self.name
        if self.namespace is not None:
            separator = "" if self.namespace.endswith(SEPARATORS) else "__"
            joined = f"{self.namespace}{separator}{self.name}"
        return UNSAFE.sub("_", joined)


@attrs.frozen
class ToolOffer:
    """A tool that a client offers. `function`: description, parameters, strictness."""

    form: ToolForm
    function: Json
    deferred: bool = False
    """Whether the prompt describes the tool only where a tool search names the tool."""
    param: str = "tools"
    """Path of the parameters' schema in the request."""
    strict: bool = False

    def after(self, description: str) -> ToolOffer:
        texts = (description, self.function.get("description", ""))
        return attrs.evolve(
            self, function={**self.function, "description": "\n\n".join(filter(None, texts))}
        )

    def as_function(self, name: str) -> Json:
        # Some templates require a description and parameters.
        return {
            "type": "function",
            "function": {
                "name": name,
                "description": "",
                "parameters": NO_FIELDS,
                **self.function,
            },
        }


def custom_offer(form: ToolForm, description: str | None) -> ToolOffer:
    """Return a function with one string. The description states the grammar, which is enforced only
    for a forced tool."""
    text = description or ""
    meant = "The text that the tool receives."
    if form.grammar is not None:
        kind = "Lark grammar" if form.grammar.kind == "lark" else "regular expression"
        text += f"\n\nThe input must match this {kind}:\n{form.grammar.source}"
        meant = f"Text that matches the {kind}."
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": meant}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    described = {"description": text.strip()} if text.strip() else {}
    return ToolOffer(form, {**described, "parameters": parameters})


def model_names(forms: Sequence[ToolForm]) -> list[str]:
    """Return distinct names: the later of two equal ones gets a number."""
    names: dict[str, None] = {}
    for form in forms:
        base = name = form.model_name
        number = 1
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names[name] = None
    return [*names]
