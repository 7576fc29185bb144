"""The sink of parsers: text, reasoning and calls, in order."""

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
Report = Callable[[Outcome], None]


class NotACall(Exception):
    """The text is no call of an offered tool."""


class _Offered:
    """The offered tools by name, with a cache of parameter types."""

    def __init__(self, tools: Tools) -> None:
        self.functions: Mapping[str, dict[str, Any]] = {
            tool["function"]["name"]: tool["function"] for tool in tools.offered
        }
        self._types: dict[str, Mapping[str, SchemaTypes]] = {}

    @cached_property
    def alike(self) -> Mapping[str, str | None]:
        """Names by casefolded form; None if ambiguous."""
        found: dict[str, str | None] = {}
        for name in self.functions:
            found[name.casefold()] = None if name.casefold() in found else name
        return found

    def types_of(self, name: str) -> Mapping[str, SchemaTypes]:
        if name not in self._types:
            self._types[name] = parameter_types(self.functions[name])
        return self._types[name]


class CallSink:
    """Collects the parts of an answer, and joins neighbours of one kind. `offset`: characters of
    the answer that are read."""

    def __init__(
        self,
        tools: Tools,
        report: Report,
        offered: _Offered | None = None,
        offset: Callable[[], int] = int,
    ) -> None:
        self._tools, self.report, self._offset = tools, report, offset
        self._spans: list[tuple[int, int]] = []
        self.held_from: int | None = None
        """Where blanks begin that become content if more follows."""
        self._offered = offered or _Offered(tools)
        self.calls = 0
        self.kind: Kind = "content"
        self._parts: list[ParsedDelta] = []
        self._pieces: list[str] = []
        self._joined: type[Content | Reasoning | CallArguments] = Content
        self._dropped = False
        self._kind: ToolKind = "function"
        self._freeform: FreeformInput | None = None

    def tentative(self) -> CallSink:
        """Return an empty sink for calls that may stay text."""
        return CallSink(attrs.evolve(self._tools, forms={}), lambda _outcome: None, self._offered)

    def take(self) -> list[ParsedDelta]:
        self._join()
        parts, self._parts = self._parts, []
        return parts

    def take_spans(self) -> list[tuple[int, int]]:
        """Return where the new content stands in the answer."""
        spans, self._spans = self._spans, []
        return spans

    def content(self, text: str, end: int | None = None) -> None:
        """`end`: of the text in the answer; default: all that is read."""
        if text:
            end = self._offset() if end is None else end
            self._spans.append((end - len(text), end))
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
        """Return the offered tool, in any case if unique: models write `bash` for `Bash`. Raises
        `NotACall`."""
        plain = written.strip().removeprefix("functions.")
        for name in (written, written.strip(), plain):
            if name in self._offered.functions:
                return name
        alike = self._offered.alike.get(plain.casefold())
        if alike is None:
            raise NotACall
        return alike

    def types_of(self, name: str) -> Mapping[str, SchemaTypes]:
        return self._offered.types_of(name)

    def start(self, name: str) -> None:
        self._join()
        self._dropped = self.calls > 0 and not self._tools.several
        self.calls += 1
        if not self._dropped:
            form = self._tools.form(name)
            self._kind = form.kind
            self._freeform = FreeformInput() if form.kind == "custom" else None
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
        self.start(name)
        self.arguments(arguments)
        self.end(repaired=repaired)
