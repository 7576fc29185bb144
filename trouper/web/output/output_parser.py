"""Parsing of an answer into content, reasoning and tool calls."""

from __future__ import annotations

from trouper.protocol.model import Tokenizer
from trouper.web.output.formats.call_sink import CallSink, Kind, Report
from trouper.web.output.formats.registry import answer_steps
from trouper.web.output.formats.text_source import TextSource
from trouper.web.output.parsed_delta import CallEnded, ParsedDelta, ParsedOutput, gathered
from trouper.web.output.tool_calls import Tools


def _unreported(_outcome: str) -> None:
    pass


class OutputParser:
    """Parses one answer. Malformed calls stay content and are reported. `thinks`: the prompt has
    opened the reasoning."""

    def __init__(
        self, tools: Tools, tokenizer: Tokenizer, *, thinks: bool, report: Report = _unreported
    ) -> None:
        self._source = TextSource()
        self._sink = CallSink(tools, report, offset=lambda: self._source.offset)
        self._steps = answer_steps(self._source, self._sink, tools, tokenizer, thinks=thinks)
        self.ended_in_call = False
        self._resume()

    @property
    def calls(self) -> int:
        return self._sink.calls

    @property
    def kind(self) -> Kind:
        return self._sink.kind

    def take_spans(self) -> list[tuple[int, int]]:
        """Return where the content since the last call stands in the answer's text."""
        return self._sink.take_spans()

    @property
    def decided(self) -> int:
        """Characters that become no further content."""
        kept, held = self._source.kept_offset, self._sink.held_from
        return kept if held is None else min(kept, held)

    def push(self, text: str) -> list[ParsedDelta]:
        self._source.feed(text)
        self._resume()
        return self._sink.take()

    def end(self, *, cut: bool = False) -> list[ParsedDelta]:
        """Return held text. `cut`: a last call stays incomplete, because clients would run half a
        call."""
        self._source.ended, self._source.cut = True, cut
        self._resume()
        parts = self._sink.take()
        if cut and parts and isinstance(parts[-1], CallEnded):
            parts.pop()
            self.ended_in_call = True
        return parts

    def reason(self, reason: str) -> str:
        """A call that a stop string has cut is none."""
        return (
            "tool_calls" if self.calls and reason == "stop" and not self.ended_in_call else reason
        )

    def parse_all(self, text: str, reason: str) -> ParsedOutput:
        deltas = [*self.push(text), *self.end(cut=reason == "length")]
        return gathered(deltas, self.reason(reason))

    def _resume(self) -> None:
        next(self._steps, None)
