"""Constraints on the format of an answer: OpenAI's response_format, and the extensions that vLLM's clients send."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import msgspec

from trouper.protocol.grammar import MAX_SOURCE, Grammar
from trouper.protocol.problems import bad_request
from trouper.web.http.body_parsing import combination, json_type, only
from trouper.web.openai.parameters import Parameters
from trouper.web.output.schema_references import ReferenceUnknown, has_references, moved

MAX_OPTIONS = 1024
SCHEMA_KEYS = frozenset({"name", "description", "schema", "strict"})


def grammar_of(parameters: Parameters) -> Grammar | None:
    """Return the grammar. Whether a schema can be followed is found out later. Raises `RequestFailed` (400) naming the
    parameter."""
    given = [
        grammar
        for name, read in READERS.items()
        if (value := getattr(parameters, name)) is not None and (grammar := read(value, name)) is not None
    ]
    if len(given) > 1:
        raise combination(f"{given[1].param} cannot be combined with {given[0].param}", given[1].param)
    return given[0] if given else None


def _response_format(value: Any, name: str) -> Grammar | None:
    if not isinstance(value, dict):
        raise bad_request(f"{name} must be an object, not {json_type(value)}", name, "invalid_type")
    kind = value.get("type")
    match kind:
        case "text":
            only(value, {"type"}, name)
            return None
        case "json_object":
            only(value, {"type"}, name)
            return Grammar("json_object", param=name)
        case "json_schema":
            only(value, {"type", "json_schema"}, name)
            return _named_schema(value.get("json_schema"), f"{name}.json_schema")
        case "regex":
            only(value, {"type", "pattern"}, name)
            return _regex(value.get("pattern"), f"{name}.pattern")
        case "grammar":
            only(value, {"type", "grammar"}, name)
            return _lark(value.get("grammar"), f"{name}.grammar")
    known = "text, json_object, json_schema, regex, grammar"
    raise bad_request(f"{name}.type must be one of {known}, not {kind!r}", f"{name}.type", "invalid_value")


def text_format(value: Any, name: str) -> Grammar | None:
    """Return the grammar of a format of the responses API, where the parts of a json_schema stand beside its type."""
    if isinstance(value, dict) and value.get("type") == "json_schema":
        return _named_schema({key: part for key, part in value.items() if key != "type"}, name)
    return _response_format(value, name)


def _named_schema(value: Any, path: str) -> Grammar:
    """Return the grammar of a schema. The answer follows it whether `strict` is set or not."""
    if not isinstance(value, dict):
        raise bad_request(f"{path} must be an object, not {json_type(value)}", path, "invalid_type")
    only(value, SCHEMA_KEYS, path)
    if not isinstance(value.get("name"), str):
        raise bad_request(f"{path}.name must be a string", f"{path}.name", "missing_required_parameter")
    if not isinstance(value.get("description"), str | None):
        raise bad_request(f"{path}.description must be a string", f"{path}.description", "invalid_type")
    if type(value.get("strict")) not in (bool, NoneType):
        raise bad_request(f"{path}.strict must be a boolean", f"{path}.strict", "invalid_type")
    if "schema" not in value:
        return Grammar("json_object", param=f"{path}.schema")
    return schema_grammar(value["schema"], f"{path}.schema")


def schema_grammar(value: Any, path: str) -> Grammar:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise bad_request(f"{path} is a string, but not of JSON", path, "invalid_json_text") from None
        if not isinstance(value, dict | bool):
            raise bad_request(f"{path} must be the JSON of a schema", path, "invalid_json_text")
    if not isinstance(value, dict | bool):
        raise bad_request(f"{path} must be a JSON Schema, not {json_type(value)}", path, "invalid_type")
    if value is True or value == {}:
        return Grammar("json_schema", '{"type": ["object", "array", "string", "number", "boolean", "null"]}', path)
    encoded = msgspec.json.encode(value)
    if isinstance(value, dict) and has_references(encoded):
        try:
            encoded = msgspec.json.encode(moved(value))
        except ReferenceUnknown as error:
            raise bad_request(f"{path} cannot be followed: {error}", path, "invalid_grammar") from None
    return Grammar("json_schema", _short(encoded.decode(), path), path)


def _short(source: str, path: str) -> str:
    if len(source) > MAX_SOURCE:
        raise bad_request(f"{path} has {len(source)} bytes, more than {MAX_SOURCE}", path, "invalid_value")
    return source


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str) or not value:
        raise bad_request(f"{path} must be a string that is not empty", path, "invalid_type")
    return _short(value, path)


def _regex(value: Any, path: str) -> Grammar:
    return Grammar("regex", _string(value, path), path)


def _lark(value: Any, path: str) -> Grammar:
    return Grammar("lark", _string(value, path), path)


def _choice(value: Any, path: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(option, str) and option for option in value):
        raise bad_request(f"{path} must be an array of strings, none empty", path, "invalid_type")
    if len(value) > MAX_OPTIONS:
        raise bad_request(f"{path} may have {MAX_OPTIONS} entries, not {len(value)}", path, "invalid_value")
    return Grammar("choice", _short(msgspec.json.encode(value).decode(), path), path)


def _structured_outputs(value: Any, name: str) -> Grammar | None:
    """Return the grammar of vLLM's newer form: one of json, regex, choice, grammar, json_object."""
    if not isinstance(value, dict):
        raise bad_request(f"{name} must be an object, not {json_type(value)}", name, "invalid_type")
    only(value, {"json", "regex", "choice", "grammar", "json_object"}, name)
    given = {key: constraint for key, constraint in value.items() if constraint is not None and constraint is not False}
    if len(given) > 1:
        raise bad_request(f"{name} may ask for one thing, not for {' and '.join(given)}", name, "invalid_value")
    for key, constraint in given.items():
        if key == "json_object":
            if constraint is not True:
                raise bad_request(f"{name}.json_object must be a boolean", f"{name}.json_object", "invalid_type")
            return Grammar("json_object", param=f"{name}.json_object")
        return {"json": schema_grammar, "regex": _regex, "choice": _choice, "grammar": _lark}[key](
            constraint, f"{name}.{key}"
        )
    return None


READERS: dict[str, Callable[[Any, str], Grammar | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": schema_grammar,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _lark,
}
