"""Answers as messages, complete and as events, and their JSON Schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

from trouper.actors.runtime.answer import Answer
from trouper.protocol.problems import Problem
from trouper.protocol.replies import Delta, Finished
from trouper.web.anthropic.errors import TYPES, anthropic_error
from trouper.web.anthropic.thinking import signature_of
from trouper.web.http.body_parsing import decoded_text
from trouper.web.http.request_schema import (
    COUNT,
    OBJECT,
    TEXT,
    Json,
    array,
    either,
    full,
    nullable,
    ref,
    titled,
)
from trouper.web.output.dialect import Choice, Usage, usage_of
from trouper.web.output.output_parser import CountingParser, OutputParser
from trouper.web.output.parsed_delta import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    ParsedDelta,
    Reasoning,
)
from trouper.web.streaming.event_log import named_event


def typed_event(body: Json) -> bytes:
    return named_event(body["type"], body)


PING = typed_event({"type": "ping"})


def usage_body(usage: Usage) -> Json:
    """Cached tokens are no input tokens. No token counts as cache creation."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


class Blocks:
    """Content blocks of an answer, as events and in `content`. A text block begins with a visible
    character unless the answer is only whitespace."""

    def __init__(self, *, omitted: bool) -> None:
        self._omitted = omitted
        self._open: Literal["text", "thinking", "call"] | None = None
        self._parts: list[str] = []
        self._held: list[str] = []
        self._call: Json = {}
        self.content: list[Json] = []
        self.calls = 0

    def say(self, deltas: Sequence[ParsedDelta]) -> list[Json]:
        events: list[Json] = []
        for delta in deltas:
            match delta:
                case Content(text):
                    events += self._more("text", text)
                case Reasoning(text):
                    events += self._more("thinking", text)
                case CallStarted():
                    events += self._begin_call(delta)
                case CallArguments(_, text):
                    events += self._arguments(text)
                case CallEnded():
                    events += self._close()
        return events

    def end(self) -> list[Json]:
        if self._open is None and not self.content and self._held:
            return [*self._begin("text", "".join(self._held)), *self._close()]
        return self._close()

    def _more(self, kind: Literal["text", "thinking"], text: str) -> list[Json]:
        if self._open == kind:
            return self._delta(text)
        events = self._close()
        if kind == "thinking":
            text = text.lstrip("\n")
            return [*events, *self._begin(kind, text)] if text else events
        self._held.append(text)
        if not text.strip():
            return events
        text = "".join(self._held)
        return [*events, *self._begin(kind, text.lstrip("\n") if self.content else text)]

    def _begin(self, kind: Literal["text", "thinking"], text: str) -> list[Json]:
        self._open, self._parts, self._held = kind, [], []
        empty: Json = {"type": "text", "text": ""} if kind == "text" else _thinking("", "")
        return [self._start(empty), *self._delta(text)]

    def _start(self, block: Json) -> Json:
        return {"type": "content_block_start", "index": len(self.content), "content_block": block}

    def _delta(self, text: str) -> list[Json]:
        self._parts.append(text)
        if self._open == "thinking":
            return (
                []
                if self._omitted
                else [self._change({"type": "thinking_delta", "thinking": text})]
            )
        return [self._change({"type": "text_delta", "text": text})]

    def _change(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self.content), "delta": delta}

    def _close(self) -> list[Json]:
        if self._open is None:
            return []
        text, events = "".join(self._parts), []
        block: Json = (
            self._call | {"input": _object(text)}
            if self._open == "call"
            else {"type": "text", "text": text}
        )
        if self._open == "thinking":
            block = _thinking(
                "" if self._omitted else text, signature_of(text, omitted=self._omitted)
            )
            events.append(
                self._change({"type": "signature_delta", "signature": block["signature"]})
            )
        self._open = None
        return [*events, self._stop(block)]

    def _stop(self, block: Json) -> Json:
        self.content.append(block)
        return {"type": "content_block_stop", "index": len(self.content) - 1}

    def _begin_call(self, call: CallStarted) -> list[Json]:
        closed = self._close()
        self.calls, self._held, self._open, self._parts = self.calls + 1, [], "call", []
        self._call = {
            "type": "tool_use",
            "id": "toolu_" + call.id.removeprefix("call_"),
            "name": call.name,
        }
        return [*closed, self._start(self._call | {"input": {}})]

    def _arguments(self, text: str) -> list[Json]:
        self._parts.append(text)
        return [self._change({"type": "input_json_delta", "partial_json": text})]


def _thinking(text: str, signature: str) -> Json:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _object(arguments: str) -> Json:
    value = decoded_text(arguments)
    return value if isinstance(value, dict) else {}


class MessageDialect:
    """`parser`: None if all is text. `cut`: the context may end before the requested length.
    `silent`: only the prompt was requested."""

    def __init__(
        self,
        request_id: str,
        model: str,
        parser: OutputParser | None,
        *,
        omitted: bool,
        cut: bool,
        silent: bool,
    ) -> None:
        self._request_id, self._model, self._parser = request_id, model, CountingParser(parser)
        self._cut, self._silent = cut, silent
        self._blocks = Blocks(omitted=omitted)

    def body(self, choices: Sequence[Choice]) -> Json:
        [choice] = choices
        for delta in choice.deltas:
            self._say(delta)
        self._end(choice.finished)
        if self._parser.stopped_in_call:
            self._blocks.content.pop()
        return (
            self._message(choice.usage)
            | self._reason(choice.finished)
            | {"content": self._blocks.content}
        )

    def opening(self, _index: int, answer: Answer) -> bytes:
        return typed_event({"type": "message_start", "message": self._message(usage_of(answer))})

    def text(self, _index: int, delta: Delta, _answer: Answer) -> bytes:
        return b"".join(map(typed_event, self._say(delta)))

    def ending(self, _index: int, finished: Finished, answer: Answer) -> bytes:
        held = self._end(finished)
        last = {
            "type": "message_delta",
            "delta": self._reason(finished),
            "usage": self._usage(usage_of(answer)),
        }
        return b"".join(map(typed_event, [*held, last]))

    def closing(self, _usages: Sequence[Usage]) -> bytes:
        return typed_event({"type": "message_stop"})

    def failure(self, problem: Problem) -> bytes:
        return typed_event(anthropic_error(problem, self._request_id))

    def heartbeat(self, _index: int, _answer: Answer) -> bytes:
        return PING

    def _message(self, usage: Usage) -> Json:
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(usage),
        }

    def _usage(self, usage: Usage) -> Json:
        counted = attrs.evolve(usage, reasoning_tokens=self._parser.reasoning_tokens)
        return usage_body(counted) | ({"output_tokens": 0} if self._silent else {})

    def _say(self, delta: Delta) -> list[Json]:
        return [] if self._silent else self._blocks.say(self._parser.push(delta))

    def _end(self, finished: Finished) -> list[Json]:
        held = [] if self._silent else self._blocks.say(self._parser.end(finished))
        return [*held, *self._blocks.end()]

    def _reason(self, finished: Finished) -> Json:
        matched = finished.matched_stop
        if self._silent:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if finished.reason == "length":
            return {
                "stop_reason": "model_context_window_exceeded" if self._cut else "max_tokens",
                "stop_sequence": None,
            }
        if self._blocks.calls and not self._parser.stopped_in_call:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        return {"stop_reason": "end_turn", "stop_sequence": None}


REASON: Json = {
    "type": "string",
    "enum": [
        "end_turn",
        "max_tokens",
        "stop_sequence",
        "tool_use",
        "model_context_window_exceeded",
    ],
}
USAGE = full(
    {
        "input_tokens": COUNT | {"description": "Without those that came from the cache."},
        "cache_creation_input_tokens": COUNT,
        "cache_read_input_tokens": COUNT,
        "output_tokens": COUNT,
        "output_tokens_details": full({"thinking_tokens": COUNT}),
    }
)


def _typed(kind: str, properties: Json) -> Json:
    return full({"type": {"const": kind}, **properties})


BLOCK = either(
    _typed("text", {"text": TEXT}),
    _typed("thinking", {"thinking": TEXT, "signature": TEXT}),
    _typed("tool_use", {"id": TEXT, "name": TEXT, "input": OBJECT}),
)
MESSAGE = _typed(
    "message",
    {
        "id": TEXT,
        "role": {"const": "assistant"},
        "model": TEXT,
        "content": array(ref("AnthropicBlock")),
        "stop_reason": nullable(REASON),
        "stop_sequence": nullable(TEXT),
        "usage": ref("AnthropicUsage"),
    },
)
ERROR = _typed(
    "error",
    {
        "error": full(
            {
                "type": {"enum": sorted({*TYPES.values(), "api_error", "invalid_request_error"})},
                "message": TEXT,
                "details": full({"error_code": TEXT}),
            },
            optional=("details",),
        ),
        "request_id": TEXT,
    },
)
DELTA = titled(
    "AnthropicDelta",
    either(
        _typed("text_delta", {"text": TEXT}),
        _typed("thinking_delta", {"thinking": TEXT}),
        _typed("signature_delta", {"signature": TEXT}),
        _typed("input_json_delta", {"partial_json": TEXT}),
    ),
)
_EVENTS = (
    _typed("message_start", {"message": ref("AnthropicMessage")}),
    _typed("content_block_start", {"index": COUNT, "content_block": ref("AnthropicBlock")}),
    _typed("content_block_delta", {"index": COUNT, "delta": DELTA}),
    _typed("content_block_stop", {"index": COUNT}),
    _typed(
        "message_delta",
        {
            "delta": full({"stop_reason": REASON, "stop_sequence": nullable(TEXT)}),
            "usage": ref("AnthropicUsage"),
        },
    ),
    _typed("message_stop", {}),
    _typed("ping", {}),
    ref("AnthropicError"),
)
EVENT = either(*_EVENTS)
COUNTED = full({"input_tokens": COUNT})

COMPONENTS: Json = {
    "AnthropicBlock": BLOCK,
    "AnthropicUsage": USAGE,
    "AnthropicMessage": MESSAGE,
    "AnthropicEvent": EVENT,
    "AnthropicError": ERROR,
}
