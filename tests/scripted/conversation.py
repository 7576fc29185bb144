"""What a script is given: the conversation as the chat template gets it, and the model's own format
to answer in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from tests.scripted.families import Family

Json = dict[str, Any]


@attrs.frozen(kw_only=True)
class Conversation:
    """A prompt. `messages` and `tools` are what the server has made of the request, before the
    template changes anything."""

    family: Family
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Other variables of the template: enable_thinking and the like."""
    forced: bool = False
    """A grammar is to be followed: a call is JSON without markers, and text is not to be formatted
    either."""
    may_call: bool = False
    """The grammar is of the text, and leaves room for calls in the model's own format."""

    @property
    def turn(self) -> int:
        """The number of answers before this one."""
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def results(self) -> list[str]:
        """The text of every tool's result, in order."""
        return [text_of(message) for message in self.messages if message["role"] == "tool"]

    @property
    def question(self) -> str:
        """The latest user's message."""
        return next(
            (text_of(message) for message in reversed(self.messages) if message["role"] == "user"),
            "",
        )

    @property
    def last_role(self) -> str:
        return str(self.messages[-1]["role"]) if self.messages else ""

    def tool(self, *names: str) -> str:
        """The first offered tool whose name contains one of these words, in their order."""
        offered = [str(tool["function"]["name"]) for tool in self.tools]
        return next(name for word in names for name in offered if word.lower() in name.lower())

    def answer(self, text: str = "", *, reasoning: str = "") -> str:
        return text if self.forced else self.family.answer(text, (), reasoning)

    def call(self, name: str, /, **arguments: Any) -> str:
        """One call and nothing else."""
        return self.calls((name, arguments))

    def calls(self, *calls: tuple[str, Json], text: str = "", reasoning: str = "") -> str:
        """Several calls in one answer, and text before them. A forced answer has room for the first
        alone."""
        if self.may_call:
            return self.family.answer("", calls, "")
        if self.forced:
            name, arguments = calls[0]
            return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return self.family.answer(text, calls, reasoning)


Script = Callable[[Conversation], str]
"""From a conversation to the raw text of the model. It is asked once for each prompt, so it must
depend on nothing else."""


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return (
        content
        if isinstance(content, str)
        else "".join(str(part.get("text", "")) for part in content)
    )
