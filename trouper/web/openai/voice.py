"""One answer of a chat: content, reasoning and calls of tools, as a message and as deltas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trouper.protocol.model import Tokenizer
from trouper.web.openai.tools import Call, Tools
from trouper.web.speech import Markers, Part, Speech

Json = dict[str, Any]


class Voice:
    """Deltas of one answer. A call is given once it is complete, so that its arguments always parse; what looks like a
    call and is none stays text."""

    def __init__(self, tools: Tools, tokenizer: Tokenizer, *, thinks: bool) -> None:
        self._tools, self._tokenizer = tools, tokenizer
        calling = tokenizer.calling if tools.offered and not tools.forced else None
        self._markers = Markers(None if tools.forced else tokenizer.thinking, calling)
        self._speech = Speech(self._markers, thinks=thinks and not tools.forced)
        self._forced = ""
        self._calls = 0
        self._pending = ""
        """Of a call that is not complete."""

    def push(self, text: str) -> list[Json]:
        if self._tools.forced:
            self._forced += text
            return []
        return self._deltas(self._speech.push(text), last=False)

    def end(self) -> list[Json]:
        if self._tools.forced:
            return self._called(self._forced, "", "")
        return self._deltas(self._speech.end(), last=True)

    def reason(self, reason: str) -> str:
        """Why it ended, once `end` was called."""
        return "tool_calls" if self._calls and reason == "stop" else reason

    def whole(self, text: str, reason: str) -> tuple[Json, str]:
        """The fields of a message, from all of its text."""
        deltas = [*self.push(text), *self.end()]
        content = "".join(delta.get("content") or "" for delta in deltas)
        thought = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        said: Json = {"content": content if content or not calls else None}
        if thought:
            said["reasoning_content"] = thought
        if calls:
            said["tool_calls"] = [{key: value for key, value in call.items() if key != "index"} for call in calls]
        return said, self.reason(reason)

    def _deltas(self, parts: Sequence[Part], *, last: bool) -> list[Json]:
        deltas: list[Json] = []
        for part in parts:
            match part.kind:
                case "content":
                    text = part.text.lstrip("\n") if self._calls else part.text
                    deltas += [{"content": text}] if text else []
                case "reasoning":
                    deltas.append({"reasoning_content": part.text})
                case "call":
                    start, end = self._markers.call or ("", "")
                    deltas += self._called(part.text, start, "" if last else end)
        return deltas

    def _called(self, text: str, start: str, end: str) -> list[Json]:
        calls = self._tools.calls(text, self._tokenizer)
        if not calls:
            return [{"content": start + text + end}] if text else []
        wanted = calls if self._tools.several else calls[: 1 - self._calls]
        return [{"tool_calls": [self._delta(call)]} for call in wanted]

    def _delta(self, call: Call) -> Json:
        self._calls += 1
        return {"index": self._calls - 1, **call.body()}


def thinks_already(prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether the prompt ends inside of thinking: some templates open it."""
    if tokenizer.thinking is None:
        return False
    start, end = tokenizer.thinking
    tail = b"".join(tokenizer.token_bytes(token) for token in prompt[-32:]).decode("utf-8", "replace")
    return tail.rfind(start) > tail.rfind(end)
