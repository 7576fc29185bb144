"""Grammars of an answer that leave room for tool calls, and for harmony's channels: each holds from
the first token on."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trouper.protocol.grammar import Grammar, GrammarKind
from trouper.protocol.model import Tokenizer
from trouper.protocol.requests import Generate
from trouper.web.http.body_parsing import combination
from trouper.web.http.leniency import ReadPast
from trouper.web.http.request_body import Report
from trouper.web.output.formats.registry import call_format
from trouper.web.output.tool_calls import Tools

KINDS: tuple[GrammarKind, ...] = ("json_object", "json_schema", "choice")
ARGUMENTS = {"hermes": "arguments", "longcat": "arguments", "llama3_json": "parameters"}
"""Formats whose calls are objects, and the key of the arguments."""
HARMONY = ("<|channel|>commentary to=",)


def with_calls(
    generates: Sequence[Generate], tools: Tools, tokenizer: Tokenizer, report: Report
) -> tuple[Generate, ...]:
    """Return requests whose grammars also accept calls. Raises `RequestFailed` (400) in a strict
    reading if calls cannot be distinguished from an answer."""
    grammar = generates[0].grammar
    if grammar is None or tools.forced or tools.freeform is not None:
        return tuple(generates)
    grammar = attrs.evolve(grammar, channels=tokenizer.tool_parser == "harmony")
    either = _either(grammar, tools, tokenizer) if tools.offered else grammar
    if either is None and isinstance(report, ReadPast):
        report.skip("tools")
    elif either is None:
        raise combination(
            f"{grammar.param} leaves no room for calls of this model: set tool_choice, or leave "
            "one out",
            "tools",
        )
    return tuple(attrs.evolve(generate, grammar=either or grammar) for generate in generates)


def _either(grammar: Grammar, tools: Tools, tokenizer: Tokenizer) -> Grammar | None:
    """The grammar that also accepts calls; None where a call could not be told from an answer."""
    if grammar.kind not in KINDS or grammar.source == "false":
        return None
    name = tokenizer.tool_parser or ""
    written = call_format(tools, tokenizer)
    starts = HARMONY if name == "harmony" else written.starts or written.bare
    starts = ("", *starts) if written.opening == "{" else starts
    if written.opening == "[":  # A list may be an answer, too.
        return None
    names = tuple(tool["function"]["name"] for tool in tools.offered)
    changed = attrs.evolve(
        grammar, calls=starts, call_names=names, call_key=ARGUMENTS.get(name, "")
    )
    return changed if starts else None
