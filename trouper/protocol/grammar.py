"""What an answer must look like."""

from __future__ import annotations

from typing import Literal

import attrs

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]

MAX_SOURCE = 256 * 1024
"""Upper bound of the characters of a schema or grammar."""


@attrs.frozen
class Grammar:
    """`source`: a JSON Schema or a JSON array of strings as JSON text, a regular expression, or a Lark grammar."""

    kind: GrammarKind
    source: str = ""
    param: str = "response_format"
    """The request's parameter that asked for it; an error names it."""
