"""Parsing of a chat answer into content, reasoning and tool calls. Each dialect formats the result in its own way."""

from __future__ import annotations

from collections.abc import Sequence

from trouper.protocol.model import Tokenizer
from trouper.web.output.parsed_delta import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    ParsedDelta,
    ParsedOutput,
    Reasoning,
    gathered,
)
from trouper.web.output.reasoning_splitter import Kind, Markers, ReasoningSplitter, TextSegment
from trouper.web.output.tool_calls import Tools


class OutputParser:
    """Parses one answer, streamed or complete. Text that looks like a call and is none stays content."""

    def __init__(self, tools: Tools, tokenizer: Tokenizer, *, thinks: bool) -> None:
        self._tools, self._tokenizer = tools, tokenizer
        calling = tokenizer.calling if tools.offered and not tools.forced else None
        self._markers = Markers(None if tools.forced else tokenizer.thinking, calling)
        self._splitter = ReasoningSplitter(self._markers, thinks=thinks and not tools.forced)
        self._forced = ""
        self.calls = 0
        """Number of calls so far."""
        self._after_call = False
        """Whether no content followed the last call: newlines there belong to no text."""

    @property
    def kind(self) -> Kind:
        """The kind of the next token, as far as is known."""
        return "call" if self._tools.forced else self._splitter.kind

    def push(self, text: str) -> list[ParsedDelta]:
        if self._tools.forced:
            self._forced += text
            return []
        return self._parsed(self._splitter.push(text), last=False)

    def end(self) -> list[ParsedDelta]:
        if self._tools.forced:
            return self._called(self._forced, "", "")
        return self._parsed(self._splitter.end(), last=True)

    def reason(self, reason: str) -> str:
        """Return the finish reason, once `end` was called."""
        return "tool_calls" if self.calls and reason == "stop" else reason

    def parse_all(self, text: str, reason: str) -> ParsedOutput:
        deltas = [*self.push(text), *self.end()]
        return gathered(deltas, self.reason(reason))

    def _parsed(self, segments: Sequence[TextSegment], *, last: bool) -> list[ParsedDelta]:
        deltas: list[ParsedDelta] = []
        for segment in segments:
            match segment.kind:
                case "content":
                    text = segment.text.lstrip("\n") if self._after_call else segment.text
                    self._after_call = self._after_call and not text
                    deltas += [Content(text)] if text else []
                case "reasoning":
                    deltas.append(Reasoning(segment.text))
                case "call":
                    start, end = self._markers.call or ("", "")
                    deltas += self._called(segment.text, start, "" if last else end)
        return deltas

    def _called(self, text: str, start: str, end: str) -> list[ParsedDelta]:
        calls = self._tools.calls(text, self._tokenizer)
        if not calls:
            return [Content(start + text + end)] if text else []
        accepted = calls if self._tools.several else calls[: max(0, 1 - self.calls)]
        deltas: list[ParsedDelta] = []
        for number, (name, arguments) in enumerate(accepted, self.calls):
            deltas += [CallStarted(number, name), CallArguments(number, arguments), CallEnded(number)]
        self.calls, self._after_call = self.calls + len(accepted), True
        return deltas
