"""Where parsers of answers put what they find: text, reasoning and calls, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

from trouper.web.output.freeform_input import FreeformInput
from trouper.web.output.parsed_delta import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    ParsedDelta,
    Reasoning,
)
from trouper.web.output.tool_calls import Tools
from trouper.web.output.tool_forms import ToolKind

Kind = Literal["content", "reasoning", "call"]
Outcome = Literal["repaired", "no_call"]
"""What became of a call that was not written as its format has it: it was repaired, or it stayed text."""
Report = Callable[[Outcome], None]


class NotACall(Exception):
    """What was read is no call of an offered tool. It stays text."""


class CallSink:
    """Collects the parsed parts of an answer. Neighbouring parts of one kind are joined."""

    def __init__(self, tools: Tools, report: Report) -> None:
        self._tools, self.report = tools, report
        self.offered: Mapping[str, dict[str, Any]] = {
            tool["function"]["name"]: tool["function"] for tool in tools.offered
        }
        """Functions of the offered tools by name."""
        self.calls = 0
        """Number of calls so far, with those that are dropped since only one is wanted."""
        self.kind: Kind = "content"
        """Kind of the text that is being generated."""
        self._parts: list[ParsedDelta] = []
        self._pieces: list[str] = []
        """Text of the part that is being added to; parts of one kind that follow each other are joined."""
        self._joined: type[Content | Reasoning | CallArguments] = Content
        self._dropped = False
        self._kind: ToolKind = "function"
        self._freeform: FreeformInput | None = None
        """Decoder of the input of the open call, if its tool is a custom one."""

    def tentative(self) -> CallSink:
        """Return an empty sink for calls that may stay text. Its calls have the model's names and arguments."""
        return CallSink(attrs.evolve(self._tools, forms={}), lambda _outcome: None)

    def take(self) -> list[ParsedDelta]:
        self._join()
        parts, self._parts = self._parts, []
        return parts

    def content(self, text: str) -> None:
        self._add(Content, text)

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, text)

    def arguments(self, text: str) -> None:
        if not self._dropped:
            self._add(CallArguments, text if self._freeform is None else self._freeform.push(text))

    def _add(self, kind: type[Content | Reasoning | CallArguments], text: str) -> None:
        if text:
            if kind is not self._joined:
                self._join()
                self._joined = kind
            self._pieces.append(text)

    def _join(self) -> None:
        if self._pieces:
            text = "".join(self._pieces)
            self._pieces.clear()
            if self._joined is CallArguments:
                self._parts.append(CallArguments(self._index, text, self._kind))
            else:
                self._parts.append(Content(text) if self._joined is Content else Reasoning(text))

    @property
    def _index(self) -> int:
        return self.calls - 1 if self._tools.several else 0

    def name_of(self, written: str) -> str:
        """Return the offered tool that is meant. One that differs in upper and lower case alone is meant, too, if it is the only one: models write
        `bash` for `Bash` and the other way round. Raises `NotACall`."""
        plain = written.strip().removeprefix("functions.")
        for name in (written, written.strip(), plain):
            if name in self.offered:
                return name
        alike = [name for name in self.offered if name.casefold() == plain.casefold()]
        if len(alike) != 1:
            raise NotACall
        return alike[0]

    def start(self, name: str) -> None:
        """Begin a call; `name` is an offered tool."""
        self._join()
        self._dropped = self.calls > 0 and not self._tools.several
        self.calls += 1
        if not self._dropped:
            form = self._tools.form(name)
            self._kind, self._freeform = form.kind, FreeformInput() if form.kind == "custom" else None
            self._parts.append(CallStarted(self._index, form))

    def end(self, *, repaired: bool = False) -> None:
        if self._freeform is not None and not self._dropped:
            self._add(CallArguments, self._freeform.end())
        self._freeform = None
        self._join()
        if repaired:
            self.report("repaired")
        if not self._dropped:
            self._parts.append(CallEnded(self._index))

    def add_call(self, name: str, arguments: str, *, repaired: bool = False) -> None:
        """Add a complete call."""
        self.start(name)
        self.arguments(arguments)
        self.end(repaired=repaired)
