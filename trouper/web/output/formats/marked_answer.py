"""Answers with markers between reasoning, calls and content: all families but harmony."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from re import Pattern

import attrs

from trouper.web.output.formats.call_sink import CallSink, NotACall
from trouper.web.output.formats.text_source import END, SPACE, Steps, TextSource
from trouper.web.output.parsed_delta import gathered

ReadSection = Callable[[TextSource, CallSink], Steps[bool]]
"""Returns whether the end marker was read. Raises `NotACall` unless a call has begun."""


@attrs.frozen
class CallFormat:
    starts: tuple[str, ...]
    section: ReadSection
    end: str = ""
    opening: str = ""
    """Characters that begin calls without a marker."""
    bare: tuple[str, ...] = ()
    """Beginnings of calls without the start marker, which Qwen3-Coder leaves out at times."""


def _no_section(_source: TextSource, _sink: CallSink) -> Steps[bool]:
    yield from ()
    raise NotACall


NO_CALLS = CallFormat((), _no_section)


# A section without a call stays text. A call inside of reasoning counts only at the end of the
# answer, where the model forgot to close the reasoning (vLLM #35687).
class MarkedAnswer:
    """Reads one answer. `thinking`: markers of reasoning; `answering`: markers of the answer,
    dropped."""

    def __init__(
        self,
        source: TextSource,
        sink: CallSink,
        thinking: tuple[str, str] | None,
        calls: CallFormat,
        answering: tuple[str, ...] = (),
    ) -> None:
        self._source, self._sink, self._thinking, self._format = source, sink, thinking, calls
        self._answering = answering
        self._space: list[str] = []
        """Whitespace that counts only if content follows."""
        self._space_end = 0
        """Offset behind it."""
        self._broken = False
        """Whether `_space` has a line break."""
        self._fresh = True
        self._bare = True
        self._unclosed = False
        self._reasoned = False

    @cached_property
    def _firsts(self) -> str:
        thinking, calls = self._thinking or (), self._format
        first = {
            marker[0]
            for marker in (
                *thinking,
                *self._answering,
                *calls.starts,
                *calls.bare,
                calls.end,
            )
            if marker
        }
        return "".join(first) + calls.opening

    @cached_property
    def _stops(self) -> Pattern[str]:
        return re.compile(f"[{re.escape(self._firsts + SPACE)}]")

    @cached_property
    def _words(self) -> Pattern[str]:
        """Match words and the space between words."""
        text = f"[^{re.escape(self._firsts)}]" if self._firsts else r"[\s\S]"
        return re.compile(f"{text}*[^{re.escape(self._firsts + SPACE)}]")

    @cached_property
    def _blanks(self) -> Pattern[str]:
        blanks = "".join(char for char in SPACE if char not in self._firsts)
        return re.compile(f"[{blanks}]+" if blanks else "(?!)")

    def read(self, *, thinks: bool) -> Steps[None]:
        """`thinks`: the prompt has opened the reasoning."""
        if thinks and self._thinking:
            yield from self._opened_again(self._thinking[0])
            yield from self._reasoning(self._thinking[1])
        while (yield from self._content_part()):
            pass

    def _content_part(self) -> Steps[bool]:
        """Read the next piece of content, or the marker or call in its place; False at the answer's
        end."""
        source = self._source
        self._emit(source.run(self._stops) if self._fresh else source.take(self._words))
        source.keep()
        if source.is_dry:  # Go on with a run again, not with a single character.
            yield
            return True
        char = yield from source.peek()
        if char == END:
            self._flush()
            return False
        if (
            self._thinking
            and self._may_open(self._thinking[0])
            and (yield from source.matches(self._thinking[0]))
        ):
            yield from self._reasoning(self._thinking[1])
        elif self._answering and (yield from self._answer_marker()):
            self._begin_content()
        elif self._fresh and char in self._format.opening:
            yield from self._section(marked=False)
        elif (yield from self._calls_begin()):
            yield from self._section(marked=True)
        elif self._unclosed and (yield from source.matches(self._format.end)):
            self._unclosed = False
        elif char in SPACE:
            space = source.take(self._blanks) or (yield from source.next())
            if not self._space:
                self._sink.held_from = source.offset - len(space)
            self._broken = self._broken or "\n" in space
            self._space.append(space)
            self._space_end = source.offset
        else:
            self._emit((yield from source.next()))
        return True

    def _may_open(self, marker: str) -> bool:
        """Text markers open reasoning only at the beginning of a line (an answer may mention
        `<think>`), special tokens anywhere."""
        return self._fresh or self._broken or "|" in marker

    def _answer_marker(self) -> Steps[bool]:
        """Text markers count only at the ends of the answer, which may mention them."""
        source = self._source
        position = source.position
        marker = yield from source.first_of(self._answering)
        if not marker:
            return False
        counts_anywhere = "|" in marker or self._fresh
        if counts_anywhere or (yield from source.ends_with(())):
            return True
        source.rewind(position)
        return False

    def _calls_begin(self) -> Steps[bool]:
        if (yield from self._source.first_of(self._format.starts)):
            return True
        position = self._source.position
        found = yield from self._source.first_of(self._format.bare)
        self._source.rewind(position)
        return bool(found)

    def _emit(self, text: str) -> None:
        if text:
            self._flush()
            self._sink.content(text)
            self._fresh = self._reasoned = False

    def _flush(self) -> None:
        space = self._taken_space()
        counted = space if self._bare or not self._fresh else space.lstrip("\n")
        self._sink.content(counted, self._space_end)

    def _taken_space(self) -> str:
        space = "".join(self._space)
        self._space.clear()
        self._broken = False
        self._sink.held_from = None
        return space

    def _begin_content(self) -> None:
        self._taken_space()
        self._sink.kind, self._fresh, self._bare = "content", True, False
        self._source.keep()

    def _section(self, *, marked: bool) -> Steps[None]:
        source, sink = self._source, self._sink
        before, sink.kind, self._reasoned = sink.calls, "call", False
        try:
            closed = yield from self._format.section(source, sink)
        except NotACall:
            sink.kind = "content"
            start = self._last_start()
            if not start and (marked or sink.calls > before):
                sink.report("no_call")
            self._not_called(before, start)
            return
        self._begin_content()
        self._unclosed = not closed and bool(self._format.end)

    def _last_start(self) -> int:
        """Position of the last start marker, or of the space before it, in a failed section behind
        its own marker; 0: none."""
        # Earlier ones are passed over, lest long runs of markers be read again for each of them.
        kept, calls = self._source.kept, self._format
        for markers in (calls.starts, calls.bare):
            if (start := max((kept.rfind(marker, 1) for marker in markers), default=-1)) > 0:
                return len(kept[:start].rstrip(SPACE))
        return 0

    def _not_called(self, before: int, start: int) -> None:
        """Text behind the last call, up to `start`, is content; `before`: number of earlier calls.
        The last character may begin a marker."""
        source = self._source
        if self._sink.calls > before:
            self._taken_space()
            self._fresh, self._bare = True, False
        if not source.position:
            return
        source.rewind(start or max(1, source.position - 1))
        self._emit(source.kept)
        source.keep()

    # -- reasoning -------------------------------------------------------------------------------

    def _opened_again(self, start: str) -> Steps[None]:
        self._sink.kind = "reasoning"
        yield from self._source.skip()
        if not (yield from self._source.matches(start)):
            self._source.rewind(0)

    def _reasoning(self, end: str) -> Steps[None]:
        """Read reasoning up to the marker `end`, the answer's end, or a call inside that ends the
        answer."""
        source, sink = self._source, self._sink
        sink.kind, fresh, before = "reasoning", True, ""
        space: list[str] = []
        # Two parts of reasoning become one, with the text in between as separator.
        if self._reasoned:
            space, fresh = [self._taken_space()], False
        elif self._space and not self._fresh:
            self._flush()
        while True:
            source.keep()
            text = source.run(self._stops) if fresh else source.take(self._words)
            if not text and source.is_dry:
                yield
                continue
            char = "" if text else (yield from source.peek())
            if not text and (char == END or (yield from self._reasoning_ends(end, before))):
                break
            if not text and (yield from self._calls_begin()):
                source.rewind(0)
                if (yield from self._called_in_reasoning(end)):
                    return
                text = source.kept
            elif char and char in SPACE:
                space.append(source.take(self._blanks) or (yield from source.next()))
                before = char
                continue
            elif not text:
                text = yield from source.next()
            blank = "".join(space)
            sink.reasoning((blank.lstrip("\n") if fresh else blank) + text)
            space.clear()
            fresh, before = False, text[-1:]
        self._begin_content()
        self._reasoned = True

    def _reasoning_ends(self, end: str, before: str) -> Steps[bool]:
        """In backquotes the marker is text."""
        if not (yield from self._source.matches(end)):
            return False
        if before == "`" and (yield from self._source.peek()) == "`":
            self._source.rewind(0)
            return False
        return True

    def _called_in_reasoning(self, end: str) -> Steps[bool]:
        source, sink = self._source, self._sink
        source.pinned = True
        considered = sink.tentative()
        behind = 0
        try:
            while (yield from self._calls_begin()):
                yield from self._format.section(source, considered)
                behind = source.position
                yield from source.skip()
            yield from source.matches(end)
            yield from source.skip()
            accepted = (yield from source.peek()) == END and not source.cut
        except NotACall:
            behind, accepted = self._last_start() or max(1, source.position - 1), False
        source.pinned = False
        if not accepted:
            source.rewind(behind)
            return False
        for call in gathered(considered.take(), "stop").calls:
            sink.add_call(call.name, call.arguments)
        return True
