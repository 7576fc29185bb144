"""Words that identifiers may not have: the field has others for the same."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator

OLD_WORDS = frozenset(
    {
        *("voice", "speech", "said", "told", "pulse", "pace", "ledger", "foretold", "fleet"),
        *("journal", "onlooker", "aside", "outlive", "showing", "looked", "choosing", "withdrawn"),
        *("gone", "hoped", "unplanned", "adopt", "disown", "orphan", "reunite", "disinherit"),
        *(
            "doubted",
            "leap",
            "fades",
            "troupe",
            "facts",
            "place",
            "asked",
            "wanted",
            "most",
            "least",
        ),
        *("beside", "whole"),
    }
)
"""The left column of the glossary of renamed words, and nouns that stood for the field's."""
VAGUE_NAMES = frozenset({"found", "parts", "known", "given"})
"""As a name alone; `found_models` says of what."""
PUBLISHED = {"requests_withdrawn", "orphan_s", "run_fleet", "fleet"}
"""Names that others use: fields of /health and metrics, and what programs import."""
PHRASES = re.compile("at_most|at_least|most_common|least_recently")
"""Bounds, and what the standard library and caches are called."""
FIELDS: dict[type[ast.AST], str] = {
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.arg: "arg",
    ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name",
    ast.ClassDef: "name",
}
"""Where a node has its identifier."""


def list_identifiers(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if field := FIELDS.get(type(node)):
            yield getattr(node, field)


def find_old_words(name: str) -> frozenset[str]:
    """The forbidden words of an identifier."""
    name = name.lower()
    if name in PUBLISHED:
        return frozenset()
    return OLD_WORDS.intersection(PHRASES.sub("", name).split("_"))


def count_words(identifiers: Iterable[str]) -> dict[str, int]:
    """How often each forbidden word and each vague name occurs; those that do not are left out."""
    counts: Counter[str] = Counter()
    for name, occurrences in Counter(identifiers).items():
        forbidden = find_old_words(name) | VAGUE_NAMES.intersection([name.strip("_").lower()])
        for word in forbidden:
            counts[word] += occurrences
    return dict(sorted(counts.items()))
