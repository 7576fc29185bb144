"""The parts of an answer that an output parser yields.

Calls do not interleave. The joined arguments are valid JSON even where the model's text was not.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from uuid import uuid4

import attrs

from trouper.web.output.tool_forms import ToolForm, ToolKind


@attrs.frozen
class Content:
    text: str


@attrs.frozen
class Reasoning:
    text: str


@attrs.frozen
class CallStarted:
    """`index` counts the calls of an answer from 0."""

    index: int
    tool: ToolForm
    id: str = attrs.field(factory=lambda: f"call_{uuid4().hex[:24]}")

    @property
    def name(self) -> str:
        return self.tool.name


@attrs.frozen
class CallArguments:
    """JSON text; of a custom tool, input."""

    index: int
    text: str
    kind: ToolKind = "function"


@attrs.frozen
class CallEnded:
    index: int


ParsedDelta = Content | Reasoning | CallStarted | CallArguments | CallEnded


@attrs.frozen
class Call:
    """`arguments`: JSON text, or a custom tool's input."""

    tool: ToolForm
    arguments: str
    id: str

    @property
    def name(self) -> str:
        return self.tool.name


@attrs.frozen
class ParsedOutput:
    content: str
    reasoning: str
    calls: tuple[Call, ...]
    reason: str
    """stop, length or tool_calls."""


def merged(deltas: Iterable[ParsedDelta]) -> list[ParsedDelta]:
    """Join neighbouring parts of one kind."""
    parts: list[ParsedDelta] = []
    for _, group in groupby(deltas, _kind):
        first, *others = group
        if others and isinstance(first, Content | Reasoning | CallArguments):
            texts = [
                first.text,
                *(other.text for other in others if isinstance(other, type(first))),
            ]
            parts.append(attrs.evolve(first, text="".join(texts)))
        else:
            parts += [first, *others]
    return parts


def _kind(part: ParsedDelta) -> tuple[type, int]:
    return type(part), 0 if isinstance(part, Content | Reasoning) else part.index


def gathered(deltas: Iterable[ParsedDelta], reason: str) -> ParsedOutput:
    content: list[str] = []
    reasoning: list[str] = []
    started: list[CallStarted] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        match delta:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallStarted():
                started.append(delta)
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
            case CallEnded():
                pass
    calls = tuple(
        Call(call.tool, "".join(texts), call.id)
        for call, texts in zip(started, arguments, strict=True)
    )
    return ParsedOutput("".join(content), "".join(reasoning), calls, reason)
