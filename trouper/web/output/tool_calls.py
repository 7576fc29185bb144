"""Tools of a chat request: the offered tools, and whether a call is required.

A tool is written as OpenAI's chat API has it, which is what templates and parsers of calls expect: {"type": "function",
"function": {"name", "description", "parameters"}}.
"""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from trouper.protocol.grammar import Grammar
from trouper.protocol.problems import bad_request
from trouper.web.output.schema_references import ReferenceUnknown, fragment_of, has_references, moved

Json = dict[str, Any]


@attrs.frozen
class Tools:
    """The tools of a request. `forced`: the answer must be a call of one of these, which its grammar guarantees."""

    offered: tuple[Json, ...] = ()
    forced: tuple[Json, ...] = ()
    several: bool = True
    """Whether an answer may have more than one call."""

    @property
    def grammar(self) -> Grammar | None:
        if not self.forced:
            return None
        definitions: Json = {}
        schemas = [_call_schema(tool["function"], definitions) for tool in self.forced]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        schema |= {"$defs": definitions} if definitions else {}
        return Grammar("json_schema", msgspec.json.encode(schema).decode(), "tools")


def _call_schema(function: Json, definitions: Json) -> Json:
    """Return the schema of a call of this function. Parameters with references are put into `definitions`, under the
    function's name."""
    name, parameters = function["name"], function.get("parameters") or {"type": "object"}
    if has_references(msgspec.json.encode(parameters)):
        location = ("$defs", name)
        try:
            definitions[name] = moved(parameters, location)
        except ReferenceUnknown as error:
            raise bad_request(
                f"tools: the parameters of {name!r} cannot be followed: {error}", "tools", "invalid_grammar"
            ) from None
        parameters = {"$ref": fragment_of(location)}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
