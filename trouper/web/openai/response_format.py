"""Constraints on answers: OpenAI's response_format, and vLLM's extensions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar

import attrs
import msgspec
from msgspec import Meta

from trouper.protocol.grammar import MAX_SOURCE, Grammar
from trouper.protocol.problems import bad_request
from trouper.web.http.body_faults import says
from trouper.web.http.body_parsing import combination
from trouper.web.http.field_types import Filled, Flag, JsonText, Text
from trouper.web.http.request_body import Body
from trouper.web.http.request_schema import Json
from trouper.web.openai import schemas
from trouper.web.output.schema_references import ReferenceUnknown, has_references, resolved

MAX_OPTIONS = 1024


Schema = Annotated[
    dict[str, Any] | bool | JsonText,
    says(
        "{path} must be a JSON Schema, not {type}",
        "invalid_type",
        description="JSON Schema, or its text.",
    ),
]
Regex = Annotated[
    str, Meta(min_length=1, max_length=MAX_SOURCE, description="As Rust's regex crate reads it.")
]
Lark = Annotated[
    str, Meta(min_length=1, max_length=MAX_SOURCE, description="A grammar as llguidance reads it.")
]
Choices = Annotated[list[Filled], Meta(min_length=1, max_length=MAX_OPTIONS)]


class NamedSchema(Body, frozen=True):
    """A JSON Schema and its name. The answer follows the schema with or without `strict`."""

    name: str
    description: Text | None = None
    schema: Schema | None = None
    strict: Flag | None = None


class TextFormat(Body, tag="text", frozen=True):
    """No constraint."""


class JsonObjectFormat(Body, tag="json_object", frozen=True):
    """Any JSON object."""


class JsonSchemaFormat(Body, tag="json_schema", frozen=True):
    """JSON that follows a schema."""

    json_schema: NamedSchema


class RegexFormat(Body, tag="regex", frozen=True):
    """Text that a regex matches."""

    pattern: Regex


class LarkFormat(Body, tag="grammar", frozen=True):
    """Text that a grammar derives."""

    grammar: Lark


class FlatSchemaFormat(NamedSchema, tag="json_schema", frozen=True):
    """JSON that follows a schema, as the responses API writes one: the parts stand beside the
    type."""


class StructuredOutputs(Body, frozen=True):
    """vLLM's newer form: one of these constraints."""

    rules: ClassVar[tuple[Json, ...]] = (schemas.ONE_CONSTRAINT,)
    harmless: ClassVar[frozenset[str] | None] = frozenset(
        {
            "disable_fallback",
            "disable_additional_properties",
            "whitespace_pattern",
        }
    )
    json: Schema | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Lark | None = None
    json_object: Flag = False
    disable_any_whitespace: Flag = False


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | LarkFormat
TextOutputFormat = TextFormat | JsonObjectFormat | FlatSchemaFormat | RegexFormat | LarkFormat


def grammar_of(parameters: Body) -> Grammar | None:
    """Schemas are checked later. Raises `RequestFailed` (400)."""
    given = [
        grammar
        for name, read in READERS.items()
        if (value := getattr(parameters, name)) is not None
        and (grammar := read(value, name)) is not None
    ]
    if len(given) > 1:
        raise combination(
            f"{given[1].param} cannot be combined with {given[0].param}", given[1].param
        )
    if not given:
        return None
    outputs = getattr(parameters, "structured_outputs", None)
    compact = outputs is not None and outputs.disable_any_whitespace
    return attrs.evolve(given[0], compact=compact)


def format_grammar(value: ResponseFormat | FlatSchemaFormat, name: str) -> Grammar | None:
    match value:
        case TextFormat():
            return None
        case JsonObjectFormat():
            return Grammar("json_object", param=name)
        case JsonSchemaFormat():
            return _named_schema(value.json_schema, f"{name}.json_schema")
        case FlatSchemaFormat():
            return _named_schema(value, name)
        case RegexFormat():
            return Grammar("regex", value.pattern, f"{name}.pattern")
        case LarkFormat():
            return Grammar("lark", value.grammar, f"{name}.grammar")


def _named_schema(value: NamedSchema, path: str) -> Grammar:
    if value.schema is None:
        return Grammar("json_object", param=f"{path}.schema")
    return schema_grammar(value.schema, f"{path}.schema", strict=bool(value.strict))


def schema_grammar(value: Schema, path: str, *, strict: bool = False) -> Grammar:
    """`strict`: whether a keyword that cannot be followed is a fault."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise bad_request(
                f"{path} is a string, but not of JSON", path, "invalid_json_text"
            ) from None
        if not isinstance(value, dict | bool):
            raise bad_request(f"{path} must be the JSON of a schema", path, "invalid_json_text")
    if value is True or value == {}:
        return Grammar(
            "json_schema",
            '{"type": ["object", "array", "string", "number", "boolean", "null"]}',
            path,
            strict=strict,
        )
    encoded = msgspec.json.encode(value)
    if isinstance(value, dict) and has_references(encoded):
        try:
            encoded = msgspec.json.encode(resolved(value))
        except ReferenceUnknown as error:
            raise bad_request(
                f"{path} cannot be followed: {error}", path, "invalid_grammar"
            ) from None
    return Grammar("json_schema", _short(encoded.decode(), path), path, strict=strict)


def _short(source: str, path: str) -> str:
    if len(source) > MAX_SOURCE:
        raise bad_request(
            f"{path} has {len(source)} bytes, more than {MAX_SOURCE}", path, "invalid_value"
        )
    return source


def _choice(value: list[str], path: str) -> Grammar:
    return Grammar("choice", _short(msgspec.json.encode(value).decode(), path), path)


def _structured_outputs(value: StructuredOutputs, name: str) -> Grammar | None:
    given = {
        key: constraint
        for key in schemas.CONSTRAINTS
        if (constraint := getattr(value, key)) not in (None, False)
    }
    if len(given) > 1:
        raise bad_request(
            f"{name} may ask for one thing, not for {' and '.join(given)}", name, "invalid_value"
        )
    for key, constraint in given.items():
        return CONSTRAINTS[key](constraint, f"{name}.{key}")
    return None


CONSTRAINTS: dict[str, Callable[[Any, str], Grammar]] = {
    "json": schema_grammar,
    "regex": partial(Grammar, "regex"),
    "choice": _choice,
    "grammar": partial(Grammar, "lark"),
    "json_object": lambda _, path: Grammar("json_object", param=path),
}
READERS: dict[str, Callable[[Any, str], Grammar | None]] = {
    "response_format": format_grammar,
    "structured_outputs": _structured_outputs,
    "guided_json": schema_grammar,
    "guided_regex": partial(Grammar, "regex"),
    "guided_choice": _choice,
    "guided_grammar": partial(Grammar, "lark"),
}
