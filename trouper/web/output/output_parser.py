"""Parsing of an answer into content, reasoning and tool calls; and the tokens of these parts, alike
in every dialect: how many are reasoning, and the log-probabilities of content."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trouper.protocol.model import Tokenizer
from trouper.protocol.replies import Delta, Finished, JoinedDelta, TokenLogprobs
from trouper.web.output.content_logprobs import ContentLogprobs
from trouper.web.output.dialect import Choice
from trouper.web.output.formats.call_sink import CallSink, Kind, Report
from trouper.web.output.formats.registry import answer_steps
from trouper.web.output.formats.text_source import TextSource
from trouper.web.output.parsed_delta import (
    CallEnded,
    Content,
    ParsedDelta,
    ParsedOutput,
    Reasoning,
    gathered,
    merged,
)
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

    def _resume(self) -> None:
        next(self._steps, None)


class CountingParser:
    """Counts reasoning tokens, markers included. Without a parser all text is content. Complete
    answers are parsed by the same deltas as streams, for equal counts."""

    def __init__(self, parser: OutputParser | None, tokenizer: Tokenizer | None = None) -> None:
        self._parser = parser
        self._logprobs = None if tokenizer is None else ContentLogprobs(tokenizer)
        self._stopped = False
        self._held = 0
        """Tokens that may be the beginning of a marker."""
        self.reasoning_tokens = 0

    @property
    def kind(self) -> str:
        return "content" if self._parser is None else self._parser.kind

    @property
    def plain(self) -> bool:
        return self._parser is None

    def push(self, delta: Delta) -> list[ParsedDelta]:
        if self._parser is None:
            if self._logprobs is not None:
                self._logprobs.add(delta.logprobs)
                self._logprobs.show_text(len(delta.text))
            return [Content(delta.text)] if delta.text else []
        if not isinstance(delta, JoinedDelta):
            return self._parsed(self._parser, delta)
        return merged(part for piece in delta.parts for part in self._parsed(self._parser, piece))

    def _parsed(self, parser: OutputParser, delta: Delta) -> list[ParsedDelta]:
        before = parser.kind
        parsed = parser.push(delta.text)
        if "reasoning" in (before, parser.kind) or any(
            isinstance(part, Reasoning) for part in parsed
        ):
            self.reasoning_tokens += self._held + len(delta.tokens)
            self._held = 0
        else:
            self._held = 0 if parsed or parser.kind == "call" else self._held + len(delta.tokens)
        self._show(parser, delta.logprobs)
        return parsed

    def _show(self, parser: OutputParser, logprobs: Sequence[TokenLogprobs] = ()) -> None:
        spans = parser.take_spans()
        if self._logprobs is not None:
            self._logprobs.add(logprobs)
            self._logprobs.show(spans, parser.decided)

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Return those of the content since the last call."""
        return [] if self._logprobs is None else self._logprobs.take()

    @property
    def stopped_in_call(self) -> bool:
        return self._stopped and self._parser is not None and self._parser.ended_in_call

    def end(self, finished: Finished) -> list[ParsedDelta]:
        """Stop strings, stop tokens and the length may cut a call."""
        self._stopped = finished.reason == "stop"
        cut = not self._stopped or finished.matched_stop is not None
        if self._parser is None:
            return []
        parsed = self._parser.end(cut=cut)
        self._show(self._parser)
        return parsed

    def reason(self, reason: str) -> str:
        return reason if self._parser is None else self._parser.reason(reason)

    def parse_all(self, choice: Choice) -> ParsedOutput:
        parsed = [part for delta in choice.deltas for part in self.push(delta)]
        parsed += self.end(choice.finished)
        output = gathered(parsed, self.reason(choice.finished.reason))
        return attrs.evolve(output, calls=output.calls[:-1]) if self.stopped_in_call else output
