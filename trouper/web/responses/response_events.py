"""A response while it is generated: its items, its events, and its state at any moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import attrs
import msgspec

from trouper.actors.runtime.answer import Answer
from trouper.protocol.model import Tokenizer
from trouper.protocol.problems import Problem
from trouper.protocol.replies import Delta, Finished, TokenLogprobs
from trouper.web.output.dialect import COMMENT, Choice, Json, Usage, usage_of
from trouper.web.output.output_parser import OutputParser, ParsedDelta
from trouper.web.output.tool_calls import Call
from trouper.web.responses.item_types import new_id, text_part
from trouper.web.responses.response_fields import usage_body
from trouper.web.service import now
from trouper.web.streaming.event_log import EventLog

encode = msgspec.json.encode
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ENDINGS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    "cancelled": "response.failed",
}
"""The last event of a stream, by status. Clients know no event for a response that was cancelled; its status says so.
"""


@attrs.define(eq=False)
class OpenItem:
    """The item that is being generated: a message or reasoning."""

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
        return text_part(text, self.logprobs) if self.kind == "content" else {"type": "reasoning_text", "text": text}

    @property
    def part_location(self) -> Json:
        return {"item_id": self.body["id"], "output_index": self.index, "content_index": 0}


class ResponseDialect:
    """Formats one response. `head` holds the fields that do not change. `ended` is called once, with the response in
    its final state.

    Every token goes through `text`, streamed or not, so that complete and streamed responses agree.
    """

    def __init__(
        self,
        head: Json,
        tokenizer: Tokenizer,
        parser: OutputParser | None,
        answer: Answer,
        *,
        ended: Callable[[], None],
        log: EventLog | None = None,
    ) -> None:
        self._head, self._tokenizer, self._parser, self._answer = head, tokenizer, parser, answer
        self._ended, self._log = ended, log
        self._output: list[Json] = []
        self._open: OpenItem | None = None
        self._blank = ""
        """Whitespace that becomes text only if text follows; alone it is no message."""
        self._seen: list[TokenLogprobs] = []
        """Log-probabilities of tokens whose text is held back."""
        self._events = 0
        self._begun = not head["background"]
        self._reasoning_tokens = 0
        self._outcome: Json = {"completed_at": None, "error": None, "incomplete_details": None}
        self._status: Status | None = None
        """The final status; None while the response runs."""
        self._last = b""

    @property
    def over(self) -> bool:
        return self._status is not None

    def response(self) -> Json:
        """Return the response in its current state."""
        if self._open is not None:
            self._open.body["content"] = [self._open.part]
        running: Status = "queued" if not self._begun and self._answer.queued else "in_progress"
        usage = usage_body(usage_of(self._answer), self._reasoning_tokens) if self.over else None
        return self._head | {"status": self._status or running, "output": self._output, "usage": usage} | self._outcome

    # -- the shape -------------------------------------------------------------------------------------

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
        before = self._kind
        deltas = self._take(delta.text)
        after = self._kind
        self._seen += delta.logprobs
        if "reasoning" in (before, after):
            self._reasoning_tokens += len(delta.tokens)
        events = self._begin() + b"".join(map(self._say, deltas))
        if not before == after == "content":
            self._seen.clear()  # Tokens of markers, reasoning and calls do not belong to the text.
        return events

    def ending(self, _: int, finished: Finished, _answer: Answer) -> bytes:
        if self.over:
            return self._last
        deltas = self._parser.end() if self._parser is not None else []
        events = self._begin() + b"".join(map(self._say, deltas))
        if not self._output:
            events += self._start_message() + self._write(self._blank)
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

    def heartbeat(self) -> bytes:
        return COMMENT

    def cancel(self) -> None:
        """Cancel the response from another request. Clients that read the answer get an error."""
        if not self.over:
            self._answer.cancel()
            self._last = self._end("cancelled")

    # -- items -----------------------------------------------------------------------------------------

    @property
    def _kind(self) -> str:
        return "content" if self._parser is None else self._parser.kind

    def _take(self, text: str) -> list[ParsedDelta]:
        if self._parser is not None:
            return self._parser.push(text)
        return [ParsedDelta("content", text)] if text else []

    def _say(self, delta: ParsedDelta) -> bytes:
        if delta.call is not None:
            return self._call(delta.call)
        if self._open is not None and self._open.kind == delta.kind:
            return self._write(delta.text)
        if delta.kind == "reasoning":
            return self._start_reasoning() + self._write(delta.text)
        self._blank += delta.text
        if not self._blank.strip():
            return b""
        text = self._blank
        return self._start_message() + self._write(text)

    def _start_message(self) -> bytes:
        return self._start({"id": new_id("msg_"), "type": "message", "role": "assistant"})

    def _start_reasoning(self) -> bytes:
        return self._start({"id": new_id("rs_"), "type": "reasoning", "summary": [], "encrypted_content": None})

    def _start(self, item: Json) -> bytes:
        closed = self._close("completed")
        item |= {"status": "in_progress", "content": []}
        added = self._added(item)
        self._open = OpenItem(item, len(self._output) - 1)
        return closed + added + self._event("response.content_part.added", self._open.part_location, self._open.part)

    def _added(self, item: Json) -> bytes:
        self._blank = ""
        self._output.append(item)
        return self._event("response.output_item.added", {"output_index": len(self._output) - 1, "item": item})

    def _write(self, text: str) -> bytes:
        assert self._open is not None
        self._open.texts.append(text)
        if self._open.kind == "reasoning":
            return self._event("response.reasoning_text.delta", self._open.part_location | {"delta": text})
        seen = [self._logprob(at) for at in self._seen]
        self._seen.clear()
        self._open.logprobs += seen
        fields = {"delta": text, "logprobs": seen}
        return self._event("response.output_text.delta", self._open.part_location | fields) if text or seen else b""

    def _close(self, status: Status) -> bytes:
        """Close the open item, if there is one."""
        if self._open is None:
            return b""
        item, part, location, number = self._open.body, self._open.part, self._open.part_location, self._open.index
        if self._open.kind == "content":
            fields = {"text": part["text"], "logprobs": part["logprobs"]}
            done = self._event("response.output_text.done", location | fields)
        else:
            done = self._event("response.reasoning_text.done", location | {"text": part["text"]})
        item |= {"status": status, "content": [part]}
        self._open = None
        return done + self._event("response.content_part.done", location, part) + self._done(item, number)

    def _done(self, item: Json, index: int) -> bytes:
        return self._event("response.output_item.done", {"output_index": index, "item": item})

    def _call(self, call: Call) -> bytes:
        """Format a call in one piece, because its arguments are known to parse only when it is complete."""
        closed = self._close("completed")
        item = {"id": new_id("fc_"), "type": "function_call", "call_id": call.id, "name": call.name}
        item |= {"arguments": "", "status": "in_progress"}
        added = self._added(item)
        number = len(self._output) - 1
        location = {"item_id": item["id"], "output_index": number}
        item |= {"arguments": call.arguments, "status": "completed"}
        arguments = self._event("response.function_call_arguments.delta", location | {"delta": call.arguments})
        arguments += self._event(
            "response.function_call_arguments.done", location | {"name": call.name, "arguments": call.arguments}
        )
        return closed + added + arguments + self._done(item, number)

    def _logprob(self, at: TokenLogprobs) -> Json:
        return self._token(at.token, at.logprob) | {"top_logprobs": [self._token(*other) for other in at.top]}

    def _token(self, token: int, logprob: float) -> Json:
        tokenizer = self._tokenizer
        return {"token": tokenizer.token_text(token), "logprob": logprob, "bytes": list(tokenizer.token_bytes(token))}

    # -- events ----------------------------------------------------------------------------------------

    def _begin(self) -> bytes:
        """Format the event with which a background response leaves the queue."""
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
        self._ended()
        return last

    def _event(self, kind: str, fields: Json, part: Json | None = None) -> bytes:
        body = {"type": kind, "sequence_number": self._events} | fields | ({} if part is None else {"part": part})
        self._events += 1
        data = b"event: " + kind.encode() + b"\ndata: " + encode(body) + b"\n\n"
        if self._log is not None:
            self._log.add(data)
        return data
