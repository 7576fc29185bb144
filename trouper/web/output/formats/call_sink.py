"""Where parsers of answers put what they find: text, reasoning and calls, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal

import attrs

from trouper.web.output.formats.parameter_types import SchemaTypes, parameter_types
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
"""What became of a call that was not written as its format has it: it was repaired, or it stayed
text."""
Report = Callable[[Outcome], None]


class NotACall(Exception):
    """What was read is no call of an offered tool. It stays text."""


class _Offered:
    """The offered tools by name. What is found of them is kept: an answer may have thousands of
    calls."""

    def __init__(self, tools: Tools) -> None:
        self.functions: Mapping[str, dict[str, Any]] = {
            tool["function"]["name"]: tool["function"] for tool in tools.offered
        }
        self._types: dict[str, Mapping[str, SchemaTypes]] = {}

    @cached_property
    def alike(self) -> Mapping[str, str | None]:
        """Names by what they are without upper case; None: there are several."""
        found: dict[str, str | None] = {}
        for name in self.functions:
            found[name.casefold()] = None if name.casefold() in found else name
        return found

    def types_of(self, name: str) -> Mapping[str, SchemaTypes]:
        if name not in self._types:
            self._types[name] = parameter_types(self.functions[name])
        return self._types[name]


class CallSink:
    """Collects the parsed parts of an answer. Neighbouring parts of one kind are joined."""

    def __init__(self, tools: Tools, report: Report, offered: _Offered | None = None) -> None:
        self._tools, self.report = tools, report
        self._offered = offered or _Offered(tools)
        self.calls = 0
        """Number of calls so far, with those that are dropped since only one is wanted."""
        self.kind: Kind = "content"
        """Kind of the text that is being generated."""
        self._parts: list[ParsedDelta] = []
        self._pieces: list[str] = []
        """Text of the part that is being added to; parts of one kind that follow each other are
        joined."""
        self._joined: type[Content | Reasoning | CallArguments] = Content
        self._dropped = False
        self._kind: ToolKind = "function"
        self._freeform: FreeformInput | None = None
        """Decoder of the input of the open call, if its tool is a custom one."""

    def tentative(self) -> CallSink:
        """Return an empty sink for calls that may stay text. Its calls have the model's names and
        arguments."""
        return CallSink(attrs.evolve(self._tools, forms={}), lambda _outcome: None, self._offered)

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
        """Return the offered tool that is meant. One that differs in upper and lower case alone is
        meant, too, if it is the only one: models write `bash` for `Bash` and the other way round.
        Raises `NotACall`."""
        plain = written.strip().removeprefix("functions.")
        for name in (written, written.strip(), plain):
            if name in self._offered.functions:
                return name
        alike = self._offered.alike.get(plain.casefold())
        if alike is None:
            raise NotACall
        return alike

    def types_of(self, name: str) -> Mapping[str, SchemaTypes]:
        """Return the JSON types that each parameter of an offered tool may have."""
        return self._offered.types_of(name)

    def start(self, name: str) -> None:
        """Begin a call; `name` is an offered tool."""
        self._join()
        self._dropped = self.calls > 0 and not self._tools.several
        self.calls += 1
        if not self._dropped:
            form = self._tools.form(name)
            self._kind, self._freeform = (
                form.kind,
                FreeformInput() if form.kind == "custom" else None,
            )
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
