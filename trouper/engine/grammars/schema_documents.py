"""The JSON schemas of a grammar: one of an answer, or one for each tool that may be called."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from trouper.engine.grammars.followed_schema import relaxed, unknown_keywords
from trouper.engine.grammars.schema_faults import Steps, narrowed, path_of
from trouper.protocol.grammar import Grammar

MAX_PATH, TAIL = 80, 57
"""Maximum number of characters of a shown path, and of its end."""


@attrs.frozen
class Location:
    steps: Steps = ()
    param: str = ""
    """The schema's parameter; "": that of the grammar."""
    tool: str = ""
    """Name of the tool; "": none."""

    def path(self, grammar: Grammar) -> str:
        return (self.param or grammar.param) + path_of(self.steps)

    def shown(self, grammar: Grammar) -> str:
        """Return the path, a long one without its middle."""
        path = self.path(grammar)
        return path if len(path) <= MAX_PATH else f"{path[: MAX_PATH - TAIL - 3]}...{path[-TAIL:]}"


ROOT = Location()


@attrs.frozen
class SchemaDocument:
    schema: Any
    strict: bool
    location: Location = ROOT
    dropped: tuple[Location, ...] = ()

    def at(self, steps: Steps) -> Location:
        return attrs.evolve(self.location, steps=steps)

    def without(self, schema: Any, dropped: Sequence[Steps]) -> SchemaDocument:
        locations = map(self.at, dropped)
        return attrs.evolve(self, schema=schema, dropped=(*self.dropped, *locations))

    def relaxed(self) -> SchemaDocument:
        """Drop what llguidance never follows, and what is too wide, unless strict. Unknown
        keywords are named in any case."""
        as_sent = self.without(self.schema, unknown_keywords(self.schema))
        if self.strict:
            return as_sent
        found = as_sent.without(*relaxed(self.schema))
        return found.without(*narrowed(found.schema))

    def free(self) -> SchemaDocument:
        """Drop all but the type."""
        kind = self.schema.get("type") if isinstance(self.schema, dict) else None
        return self.without(
            {"type": "object"} if self.location.tool or kind == "object" else {}, [()]
        )


def documents_of(grammar: Grammar) -> Iterator[SchemaDocument]:
    """Raises `ValueError` or `RecursionError`."""
    if grammar.kind == "json_schema":
        yield SchemaDocument(json.loads(grammar.source), grammar.strict)
    for call in json.loads(grammar.source) if grammar.kind == "calls" else ():
        location = Location(param=call["param"], tool=call["name"])
        yield SchemaDocument(call["parameters"], grammar.strict or call["strict"], location)


def with_documents(grammar: Grammar, documents: Sequence[SchemaDocument]) -> Grammar:
    """Return the grammar with changed schemas, of which nothing is to be dropped."""
    grammar = attrs.evolve(grammar, strict=True)
    if not any(document.dropped for document in documents):
        return grammar
    if grammar.kind == "json_schema":
        return attrs.evolve(grammar, source=json.dumps(documents[0].schema))
    calls = [
        call | {"parameters": document.schema}
        for call, document in zip(json.loads(grammar.source), documents, strict=True)
    ]
    return attrs.evolve(grammar, source=json.dumps(calls))
