"""One answer of a chat, taken apart: content, reasoning, and calls of tools. Every dialect says it in its own words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

from trouper.protocol.model import Tokenizer
from trouper.web.output.reasoning_splitter import Kind, Markers, Part, Speech
from trouper.web.output.tool_calls import Call, Tools


@attrs.frozen
class Said:
    """More of an answer. A call comes once it is complete, so that its arguments always parse."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    call: Call | None = None


@attrs.frozen
class Whole:
    """All of an answer."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]
    reason: str
    """stop, length or tool_calls."""


class Voice:
    """What looks like a call and is none stays text."""

    def __init__(self, tools: Tools, tokenizer: Tokenizer, *, thinks: bool) -> None:
        self._tools, self._tokenizer = tools, tokenizer
        calling = tokenizer.calling if tools.offered and not tools.forced else None
        self._markers = Markers(None if tools.forced else tokenizer.thinking, calling)
        self._speech = Speech(self._markers, thinks=thinks and not tools.forced)
        self._forced = ""
        self.calls = 0
        """Made so far."""
        self._after_call = False
        """Nothing was said since: newlines there are nobody's text."""

    @property
    def kind(self) -> Kind:
        """What the next token belongs to, as far as is known."""
        return "call" if self._tools.forced else self._speech.kind

    def push(self, text: str) -> list[Said]:
        if self._tools.forced:
            self._forced += text
            return []
        return self._said(self._speech.push(text), last=False)

    def end(self) -> list[Said]:
        if self._tools.forced:
            return self._called(self._forced, "", "")
        return self._said(self._speech.end(), last=True)

    def reason(self, reason: str) -> str:
        """Why it ended, once `end` was called."""
        return "tool_calls" if self.calls and reason == "stop" else reason

    def whole(self, text: str, reason: str) -> Whole:
        said = [*self.push(text), *self.end()]
        return Whole(
            "".join(one.text for one in said if one.kind == "content"),
            "".join(one.text for one in said if one.kind == "reasoning"),
            tuple(one.call for one in said if one.call is not None),
            self.reason(reason),
        )

    def _said(self, parts: Sequence[Part], *, last: bool) -> list[Said]:
        said: list[Said] = []
        for part in parts:
            match part.kind:
                case "content":
                    text = part.text.lstrip("\n") if self._after_call else part.text
                    self._after_call = self._after_call and not text
                    said += [Said("content", text)] if text else []
                case "reasoning":
                    said.append(Said("reasoning", part.text))
                case "call":
                    start, end = self._markers.call or ("", "")
                    said += self._called(part.text, start, "" if last else end)
        return said

    def _called(self, text: str, start: str, end: str) -> list[Said]:
        calls = self._tools.calls(text, self._tokenizer)
        if not calls:
            return [Said("content", start + text + end)] if text else []
        wanted = calls if self._tools.several else calls[: max(0, 1 - self.calls)]
        self.calls, self._after_call = self.calls + len(wanted), True
        return [Said("call", call=call) for call in wanted]
