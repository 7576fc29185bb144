"""Checks of a conversation's parameters and model against the server's description."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import httpx2

from trouper.cli.client import NotTrouper, plain, problem_of, read_as_trouper
from trouper.cli.conversation import CommandRefused

CHAT = "/v1/chat/completions"
TYPES: Mapping[str, tuple[type, ...]] = {
    "number": (int, float),
    "integer": (int,),
    "string": (str,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
NAMES = {
    "number": "a number",
    "integer": "a whole number",
    "string": "a text",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
}
Schema = Mapping[str, Any]


class ServerChecks:
    """Asks the server at the first check, and refuses nothing where it does not answer."""

    def __init__(self, client: httpx2.Client) -> None:
        self._client = client

    def require_model(self, name: str) -> None:
        """Raises `CommandRefused` for a model that the server does not have."""
        try:
            answer = self._client.get(f"/v1/models/{quote(name)}")
        except httpx2.HTTPError as error:
            raise CommandRefused(plain(error)) from error
        if answer.status_code == HTTPStatus.NOT_FOUND:
            raise CommandRefused(problem_of(answer))

    def require_parameter(self, name: str, value: Any) -> None:
        """Raises `CommandRefused` for a misspelt name, and for a value that the description of the
        server excludes. Other unknown names are those of other servers, or are named in the next
        answer."""
        parameters = self._description.get("properties", {})
        schema = parameters.get(name)
        if schema is None:
            if near := difflib.get_close_matches(name, parameters, 1, 0.8):
                raise CommandRefused(f"there is no parameter {name}; did you mean {near[0]}?")
            return
        forms = [*self._forms(schema)]
        if value is not None and not any(_allows(form, value) for form in forms):
            expected = " or ".join(dict.fromkeys(filter(None, map(_name, forms))))
            raise CommandRefused(f"{name} must be {expected}, not {json.dumps(value)}")

    @cached_property
    def _document(self) -> Schema:
        try:
            answer = self._client.get("/openapi.json").raise_for_status()
            with read_as_trouper(self._client):
                return dict(answer.json())
        except (httpx2.HTTPError, NotTrouper):
            return {}

    @cached_property
    def _description(self) -> Schema:
        """JSON schema of a chat's request; empty where the server has none."""
        schema: Schema = {}
        try:
            operation = self._document["paths"][CHAT]["post"]
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
        except (KeyError, TypeError):
            return {}
        return self._resolved(schema)

    def _resolved(self, schema: Schema) -> Schema:
        reference = str(schema.get("$ref", ""))
        schemas = self._document.get("components", {}).get("schemas", {})
        return dict(schemas.get(reference.rpartition("/")[2], {})) if reference else schema

    def _forms(self, schema: Schema) -> Iterator[Schema]:
        """The alternatives of a schema, without references."""
        resolved = self._resolved(schema)
        for form in resolved.get("anyOf") or ():
            yield from self._forms(form)
        if "anyOf" not in resolved:
            yield resolved


def _allows(form: Schema, value: Any) -> bool:
    """Whether type, bounds and choices allow a value. Further constraints are the server's."""
    types = _types(form)
    if isinstance(value, bool):  # Python's are numbers.
        fits = not types or "boolean" in types
    else:
        fits = not types or isinstance(
            value, tuple(each for t in types for each in TYPES.get(t, ()))
        )
        if fits and isinstance(value, int | float):
            fits = form.get("minimum", value) <= value <= form.get("maximum", value)
    return fits and value in form.get("enum", [value])


def _types(form: Schema) -> list[str]:
    kind = form.get("type", [])
    return [kind] if isinstance(kind, str) else [*kind]


def _name(form: Schema) -> str:
    if choices := form.get("enum"):
        return ", ".join(map(str, choices))
    names = " or ".join(NAMES[kind] for kind in _types(form) if kind in NAMES)
    low, high = form.get("minimum"), form.get("maximum")
    if low is not None and high is not None:
        return f"{names} from {low:,} to {high:,}" if high < 2**31 else f"{names} from {low:,}"
    return f"{names} from {low:,}" if low is not None else names
