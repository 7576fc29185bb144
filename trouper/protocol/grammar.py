"""Grammars: the form of an answer."""

from __future__ import annotations

from typing import Literal

import attrs

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]

# Maximum number of characters of a schema or grammar.
MAX_SOURCE = 256 * 1024


@attrs.frozen
class Grammar:
    """`source`: a JSON Schema or a JSON array of strings as JSON text, a regular expression, or a
    Lark grammar."""

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
