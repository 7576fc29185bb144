"""The items, events and current state of a response during generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

from trouper.actors.runtime.answer import Answer
from trouper.protocol.model import Tokenizer
from trouper.protocol.problems import Problem
from trouper.protocol.replies import Delta, Finished, TokenLogprobs, parts_of
from trouper.web.output.dialect import Choice, Json, Usage, usage_of
from trouper.web.output.output_parser import CountingParser, OutputParser
from trouper.web.output.parsed_delta import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    ParsedDelta,
    Reasoning,
)
from trouper.web.output.tool_forms import ToolKind
from trouper.web.responses.call_items import CALLS, new_id, text_part
from trouper.web.responses.response_request import ResolvedRequest
from trouper.web.responses.response_tools import call_fields
from trouper.web.serving.service import now
from trouper.web.streaming.event_log import EventLog, named_event

EVENTS: dict[ToolKind, str] = {
    "function": "response.function_call_arguments",
    "custom": "response.custom_tool_call_input",
}
"""Events of call arguments, by kind of tool. Calls of other kinds are sent whole."""


@attrs.define(eq=False)
class OpenItem:
    """The message or reasoning that is being generated."""

    body: Json
    index: int
    texts: list[str] = attrs.field(factory=list)
    logprobs: list[Json] = attrs.field(factory=list)

    @property
    def kind(self) -> str:
        return "content" if self.body["type"] == "message" else "reasoning"

    @property
    def part(self) -> Json:
        text = "".join(self.texts)
        return (
            text_part(text, self.logprobs)
            if self.kind == "content"
            else {"type": "reasoning_text", "text": text}
        )

    @property
    def part_location(self) -> Json:
        return {"item_id": self.body["id"], "output_index": self.index, "content_index": 0}


@attrs.define(eq=False)
class OpenCall:
    body: Json
    index: int
    kind: ToolKind
    texts: list[str] = attrs.field(factory=list)

    @classmethod
    def of(cls, call: CallStarted, index: int) -> OpenCall:
        tool = call.tool
        [kind] = [name for name, known in CALLS.items() if known == tool.kind]
        item: Json = {"id": new_id(kind), "type": kind, "call_id": call.id}
        if tool.kind in EVENTS:
            item |= {"name": tool.name} | (
                {} if tool.namespace is None else {"namespace": tool.namespace}
            )
        item |= {"environment": None} if tool.kind == "shell" else {}
        return cls(item | call_fields(tool.kind, "") | {"status": "in_progress"}, index, tool.kind)

    @property
    def event(self) -> str | None:
        """Name of the argument events without the suffix, if any."""
        return EVENTS.get(self.kind)

    def update(self) -> Json:
        """Write generated arguments into the item, and return the fields that hold the
        arguments."""
        fields = call_fields(self.kind, "".join(self.texts))
        self.body |= fields
        return fields

    @property
    def location(self) -> Json:
        return {"item_id": self.body["id"], "output_index": self.index}


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ENDINGS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    "cancelled": "response.failed",
}
"""The last event of a stream, by status. Clients know no event for a cancelled response; the status
tells."""


class ResponseDialect:
    """Formats one response. `head` has the constant fields.

    Every token goes through `text`, also without a stream: complete and streamed responses agree.
    """

    def __init__(
        self,
        head: Json,
        tokenizer: Tokenizer,
        parser: OutputParser | None,
        answer: Answer,
        *,
        log: EventLog | None = None,
    ) -> None:
        self._head, self._tokenizer, self._answer = head, tokenizer, answer
        self._parser = CountingParser(parser, tokenizer)
        self._log = log
        self._output: list[Json] = []
        self._open: OpenItem | None = None
        self._call: OpenCall | None = None
        self._blank: list[str] = []
        """Whitespace that only counts once text follows."""
        self._seen: list[TokenLogprobs] = []
        """Log-probabilities of text that is not written yet."""
        self._events = 0
        self._begun = not head["background"]
        self._outcome: Json = {"completed_at": None, "error": None, "incomplete_details": None}
        self._status: Status | None = None
        self._last = b""

    @property
    def over(self) -> bool:
        return self._status is not None

    def response(self) -> Json:
        if self._open is not None:
            self._open.body["content"] = [self._open.part]
        if self._call is not None:
            self._call.update()
        running: Status = "queued" if not self._begun and self._answer.queued else "in_progress"
        counted = attrs.evolve(
            usage_of(self._answer), reasoning_tokens=self._parser.reasoning_tokens
        )
        usage = usage_body(counted) if self.over else None
        return (
            self._head
            | {"status": self._status or running, "output": self._output, "usage": usage}
            | self._outcome
        )

    # -- the shape --------------------------------------------------------------------------------

    def body(self, choices: Sequence[Choice]) -> Json:
        [choice] = choices
        for delta in choice.deltas:
            self.text(0, delta, self._answer)
        self.ending(0, choice.finished, self._answer)
        return self.response()

    def opening(self, _: int, _answer: Answer) -> bytes:
        following = "response.in_progress" if self._begun else "response.queued"
        return self._stage("response.created") + self._stage(following)

    def text(self, _: int, delta: Delta, _answer: Answer) -> bytes:
        if self.over:
            return b""
        parts = (delta,) if self._parser.plain else parts_of(delta)
        return self._begin() + b"".join(map(self._part, parts))

    def _part(self, delta: Delta) -> bytes:
        deltas = self._parser.push(delta)
        self._seen += self._parser.take_logprobs()
        return b"".join(map(self._say, deltas))

    def ending(self, _: int, finished: Finished, _answer: Answer) -> bytes:
        if self.over:
            return self._last
        deltas = self._parser.end(finished)
        self._seen += self._parser.take_logprobs()
        events = self._begin() + b"".join(map(self._say, deltas))
        if self._parser.stopped_in_call:
            events += self._close_call("incomplete")
        if not self._output:
            blank = "".join(self._blank)
            events += self._start_message() + self._write(blank)
        elif self._seen and self._open is not None and self._open.kind == "content":
            events += self._write("")
        if finished.reason == "length":
            self._outcome["incomplete_details"] = {"reason": "max_output_tokens"}
            return events + self._end("incomplete")
        self._outcome["completed_at"] = now()
        return events + self._end("completed")

    def closing(self, _: Sequence[Usage]) -> bytes:
        return b""

    def failure(self, problem: Problem) -> bytes:
        if self.over:
            return self._last
        if problem.code == "cancelled":
            return self._end("cancelled")
        self._outcome["error"] = {"code": "server_error", "message": problem.message}
        error = {"code": problem.code, "message": problem.message, "param": problem.param}
        return self._event("error", error) + self._end("failed")

    def heartbeat(self, _: int, _answer: Answer) -> bytes:
        return self._stage("response.in_progress")

    def heartbeat_behind(self, number: int) -> bytes:
        """Format a heartbeat for a reader of the event log. The number is the last event's, for
        `starting_after`; heartbeats are not logged."""
        response = self.response()
        return _framed(
            f"response.{response['status']}", {"sequence_number": number, "response": response}
        )

    def cancel(self) -> None:
        """Cancel from another request. Clients that read the answer get an error."""
        if not self.over:
            self._answer.cancel()
            self._last = self._end("cancelled")

    # -- items ------------------------------------------------------------------------------------

    def _say(self, delta: ParsedDelta) -> bytes:
        """Format a part of the answer as events. Blanks wait until text follows."""
        match delta:
            case Content(text) if self._open is not None and self._open.kind == "content":
                return self._write(text)
            case Content(text):
                self._blank.append(text)
                blank = "".join(self._blank) if text.strip() else ""
                return self._start_message() + self._write(blank) if blank else b""
            case Reasoning(text):
                begun = (
                    b""
                    if self._open is not None and self._open.kind == "reasoning"
                    else self._start_reasoning()
                )
                return begun + self._write(text)
            case CallStarted():
                return self._start_call(delta)
            case CallArguments(_, text):
                return self._write_arguments(text)
            case CallEnded():
                return self._close_call("completed")

    def _start_message(self) -> bytes:
        return self._start({"id": new_id("message"), "type": "message", "role": "assistant"})

    def _start_reasoning(self) -> bytes:
        self._seen.clear()
        return self._start(
            {
                "id": new_id("reasoning"),
                "type": "reasoning",
                "summary": [],
                "encrypted_content": None,
            }
        )

    def _start(self, item: Json) -> bytes:
        closed = self._close("completed")
        item |= {"status": "in_progress", "content": []}
        added = self._added(item)
        self._open = OpenItem(item, len(self._output) - 1)
        return (
            closed
            + added
            + self._event("response.content_part.added", self._open.part_location, self._open.part)
        )

    def _added(self, item: Json) -> bytes:
        self._blank.clear()
        self._output.append(item)
        return self._event(
            "response.output_item.added", {"output_index": len(self._output) - 1, "item": item}
        )

    def _write(self, text: str) -> bytes:
        assert self._open is not None
        self._open.texts.append(text)
        if self._open.kind == "reasoning":
            return self._event(
                "response.reasoning_text.delta", self._open.part_location | {"delta": text}
            )
        seen = [self._logprob(at) for at in self._seen]
        self._seen.clear()
        self._open.logprobs += seen
        fields = {"delta": text, "logprobs": seen}
        return (
            self._event("response.output_text.delta", self._open.part_location | fields)
            if text or seen
            else b""
        )

    def _close(self, status: Status) -> bytes:
        if self._open is None:
            return self._close_call(status)
        item = self._open.body
        part = self._open.part
        location = self._open.part_location
        number = self._open.index
        if self._open.kind == "content":
            fields = {"text": part["text"], "logprobs": part["logprobs"]}
            done = self._event("response.output_text.done", location | fields)
        else:
            done = self._event("response.reasoning_text.done", location | {"text": part["text"]})
        item |= {"status": status, "content": [part]}
        self._open = None
        return (
            done
            + self._event("response.content_part.done", location, part)
            + self._done(item, number)
        )

    def _done(self, item: Json, index: int) -> bytes:
        return self._event("response.output_item.done", {"output_index": index, "item": item})

    def _start_call(self, call: CallStarted) -> bytes:
        closed = self._close("completed")
        self._seen.clear()
        self._call = OpenCall.of(call, len(self._output))
        return closed + self._added(self._call.body)

    def _write_arguments(self, text: str) -> bytes:
        assert self._call is not None
        self._call.texts.append(text)
        if self._call.event is None:
            return b""
        return self._event(f"{self._call.event}.delta", self._call.location | {"delta": text})

    def _close_call(self, status: Status) -> bytes:
        if self._call is None:
            return b""
        call, self._call = self._call, None
        fields, done = call.update(), b""
        call.body["status"] = status
        if call.event is not None:
            named = {"name": call.body["name"]} if call.kind == "function" else {}
            done = self._event(f"{call.event}.done", call.location | named | fields)
        return done + self._done(call.body, call.index)

    def _logprob(self, at: TokenLogprobs) -> Json:
        return self._token(at.token, at.logprob) | {
            "top_logprobs": [self._token(*other) for other in at.top]
        }

    def _token(self, token: int, logprob: float) -> Json:
        tokenizer = self._tokenizer
        return {
            "token": tokenizer.token_text(token),
            "logprob": logprob,
            "bytes": list(tokenizer.token_bytes(token)),
        }

    # -- events -----------------------------------------------------------------------------------

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return self._stage("response.in_progress")

    def _stage(self, kind: str) -> bytes:
        return self._event(kind, {"response": self.response()})

    def _end(self, status: Status) -> bytes:
        closed = self._close("completed" if status == "completed" else "incomplete")
        self._status = status
        last = closed + self._stage(ENDINGS[status])
        if self._log is not None:
            self._log.close()
        return last

    def _event(self, kind: str, fields: Json, part: Json | None = None) -> bytes:
        data = _framed(
            kind,
            {"sequence_number": self._events} | fields | ({} if part is None else {"part": part}),
        )
        self._events += 1
        if self._log is not None:
            self._log.add(data)
        return data


def _framed(kind: str, fields: Json) -> bytes:
    """Format an event. Codex times out on comments alone."""
    return named_event(kind, {"type": kind} | fields)


def full_context_events(head: Json, problem: Problem) -> bytes:
    """Format the whole stream of a response whose prompt exceeds the context, as OpenAI's API
    does."""
    # Codex makes a conversation shorter after `response.failed` with that code, not after a 400.
    outcome: Json = {"completed_at": None, "error": None, "incomplete_details": None}
    running = head | {"status": "in_progress", "output": [], "usage": None} | outcome
    error = {"code": problem.code, "message": problem.message}
    # OpenAI's clients raise after this form, and read past the documented one.
    nested = error | {"type": problem.type, "param": problem.param}
    failed = running | {"status": "failed", "error": error}
    events: tuple[tuple[str, Json], ...] = (
        ("response.created", {"response": running}),
        ("response.in_progress", {"response": running}),
        ("error", error | {"param": problem.param, "error": nested}),
        ("response.failed", {"response": failed}),
    )
    return b"".join(
        _framed(kind, {"sequence_number": number} | fields)
        for number, (kind, fields) in enumerate(events)
    )


def head_of(resolved: ResolvedRequest, response_id: str, model: str, *, stored: bool) -> Json:
    parsed, given = resolved.request, resolved.given
    text: Json = given.get("text") or {}
    return {
        "id": response_id,
        "object": "response",
        "created_at": now(),
        "model": model,
        "background": parsed.background,
        "instructions": parsed.instructions,
        "previous_response_id": parsed.previous_response_id,
        "max_output_tokens": parsed.max_output_tokens,
        "max_tool_calls": parsed.max_tool_calls,
        "temperature": resolved.sampling.temperature,
        "top_p": resolved.sampling.top_p,
        "top_logprobs": parsed.top_logprobs or 0,
        "tools": given.get("tools") or [],
        "tool_choice": given.get("tool_choice") or "auto",
        "parallel_tool_calls": parsed.parallel_tool_calls,
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": resolved.effort, "summary": None},
        "truncation": "disabled",
        "service_tier": "default",
        "store": stored,
        "metadata": parsed.metadata or {},
        "user": parsed.user,
        "safety_identifier": parsed.safety_identifier,
        "prompt_cache_key": parsed.prompt_cache_key,
    }


def usage_body(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
