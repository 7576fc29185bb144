"""The parts of an answer that an output parser yields, and that dialects format.

A call is streamed: `CallStarted` as soon as its tool is known, `CallArguments` as its arguments are
generated, and `CallEnded`. Calls do not interleave: between the start and the end of a call there
are only its arguments. The text of all `CallArguments` of a call is the JSON of its arguments,
complete even where the model's text was not; what cannot be a call of an offered tool never starts
one and is `Content`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from uuid import uuid4

import attrs

from trouper.web.output.tool_forms import ToolForm, ToolKind


@attrs.frozen
class Content:
    """More text of the answer."""

    text: str


@attrs.frozen
class Reasoning:
    """More text of the reasoning."""

    text: str


@attrs.frozen
class CallStarted:
    """A call of a tool begins. `index` counts the calls of an answer from 0."""

    index: int
    tool: ToolForm
    id: str = attrs.field(factory=lambda: f"call_{uuid4().hex[:24]}")

    @property
    def name(self) -> str:
        """The name by which the client knows the tool."""
        return self.tool.name


@attrs.frozen
class CallArguments:
    """More of the JSON text of a call's arguments; of a custom tool, more of its input."""

    index: int
    text: str
    kind: ToolKind = "function"


@attrs.frozen
class CallEnded:
    """The call is complete."""

    index: int


ParsedDelta = Content | Reasoning | CallStarted | CallArguments | CallEnded


@attrs.frozen
class Call:
    """A complete call: a tool and its arguments as JSON text; of a custom tool, its input."""

    tool: ToolForm
    arguments: str
    id: str

    @property
    def name(self) -> str:
        return self.tool.name


@attrs.frozen
class ParsedOutput:
    """A complete answer after parsing."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]
    reason: str
    """The finish reason: stop, length or tool_calls."""


def merged(deltas: Iterable[ParsedDelta]) -> list[ParsedDelta]:
    """Join neighbouring parts of one kind, so that they are one event."""
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
    """Join all deltas of an answer."""
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
