"""Grammars: the form that an answer must have."""

from __future__ import annotations

from typing import Literal

import attrs

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]

MAX_SOURCE = 256 * 1024
"""Upper bound of the characters of a schema or grammar."""


@attrs.frozen
class Grammar:
    """A grammar that constrains an answer. `source`: a JSON Schema or a JSON array of strings as
    JSON text, a regular expression, or a Lark grammar."""

    kind: GrammarKind
    source: str = ""
    param: str = "response_format"
    """Request parameter that asked for the grammar; an error names it."""
    calls: tuple[str, ...] = ()
    """Markers before calls of tools; "": a call needs none. An answer that calls a tool need not
    follow the grammar."""
    call_names: tuple[str, ...] = ()
    """Names of the tools that may be called."""
    call_key: str = ""
    """Key of the arguments in a call that is an object, behind its key `name`; "": calls are no
    such objects."""
    channels: bool = False
    """Whether the model writes harmony: it may think first, and the grammar holds for its message
    in the channel `final`."""
