"""What a client calls a tool, and what the model calls it.

A model knows functions only, with names that its template and the parser of its calls can hold.
Everything else that a client may offer becomes a function: custom tools (whose input is text),
tools within a namespace, shells, patches. Here are the names and the way back, so that an answer
has the item and the name that the client expects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import attrs

from trouper.protocol.grammar import Grammar

Json = dict[str, Any]
ToolKind = Literal["function", "custom", "local_shell", "shell", "apply_patch"]
UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
SEPARATORS = ("_", ".", "-", "/", ":")
NOTHING: Json = {"type": "object", "properties": {}}
"""Parameters of a function without any."""
INPUT = "input"
"""Parameter of the function that stands for a custom tool."""


@attrs.frozen
class ToolForm:
    """A tool as its client knows it."""

    name: str
    kind: ToolKind = "function"
    namespace: str | None = None
    grammar: Grammar | None = attrs.field(default=None, eq=False)
    """What the input of a custom tool must match."""

    @property
    def model_name(self) -> str:
        """The name that the model sees, unless another tool has it: letters, digits, '_', '.' and
        '-'."""
        joined = self.name
        if self.namespace is not None:
            separator = "" if self.namespace.endswith(SEPARATORS) else "__"
            joined = f"{self.namespace}{separator}{self.name}"
        return UNSAFE.sub("_", joined)


@attrs.frozen
class ToolOffer:
    """A tool that a client offers. `function`: description, parameters and strictness, as templates
    expect them."""

    form: ToolForm
    function: Json
    deferred: bool = False
    """The prompt describes it only where a result of the client's own search names it."""

    def after(self, description: str) -> ToolOffer:
        """Return the tool with a text in front of its description."""
        texts = (description, self.function.get("description", ""))
        return attrs.evolve(
            self, function={**self.function, "description": "\n\n".join(filter(None, texts))}
        )

    def as_function(self, name: str) -> Json:
        """Return the tool as templates expect it: some fail where a description or parameters are
        missing."""
        return {
            "type": "function",
            "function": {"name": name, "description": "", "parameters": NOTHING, **self.function},
        }


def custom_offer(form: ToolForm, description: str | None) -> ToolOffer:
    """Return a custom tool as a function with one string. Its grammar is described: it is enforced
    only where the tool is forced."""
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
    """Return a name for each tool, all different: the later of two equal ones gets a number."""
    names: dict[str, None] = {}
    for form in forms:
        base = name = form.model_name
        number = 1
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names[name] = None
    return [*names]


def input_as_arguments(text: str) -> str:
    """Return the arguments, as JSON, of the function that stands for a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)
