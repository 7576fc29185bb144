"""Grammars: the form of an answer."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import attrs

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "calls"]

# Maximum number of characters of a schema or grammar.
MAX_SOURCE = 256 * 1024


@attrs.frozen
class Grammar:
    """`source`: a JSON Schema or a JSON array of strings as JSON text, a regular expression, or a
    Lark grammar; of calls a JSON array of `CallSchema`."""

    kind: GrammarKind
    source: str = ""
    param: str = "response_format"
    calls: tuple[str, ...] = ()
    """Markers before tool calls, which need not follow the grammar; "": a call needs no marker."""
    call_names: tuple[str, ...] = ()
    call_key: str = ""
    """Key of the arguments in a call that is an object, behind the key `name`; "": other forms."""
    channels: bool = False
    """Whether the model writes harmony: the grammar holds in the channel `final` only."""
    strict: bool = True
    """Whether a keyword of a schema that cannot be followed is a fault; else the keyword is
    dropped. In a grammar of calls: for all of them, whatever each says."""
    compact: bool = False
    """Whether JSON has no blanks between its tokens."""


class CallSchema(TypedDict):
    """A tool of which a call is allowed."""

    name: str
    parameters: Any
    """JSON Schema of the arguments."""
    param: str
    """Path of the schema in the request."""
    strict: bool


@attrs.frozen
class FollowedGrammar:
    """A grammar that is ready for rows."""

    grammar: Grammar
    """The grammar to follow: nothing of it is left to drop."""
    ignored: tuple[str, ...] = ()
    """Paths of dropped keywords in the request."""
    kept: object = None
    """Keeps the compiled grammar for the engine."""
