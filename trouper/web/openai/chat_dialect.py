"""Chat answers, complete and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from trouper.actors.runtime.answer import Answer
from trouper.protocol.replies import Delta, Finished, TokenLogprobs
from trouper.web.openai.openai_dialect import Envelope, Extras, OpenAiDialect, encode
from trouper.web.output.dialect import Choice, Json, Usage, total, usage_of
from trouper.web.output.output_parser import CountingParser, OutputParser
from trouper.web.output.parsed_delta import (
    Call,
    CallArguments,
    CallStarted,
    Content,
    ParsedDelta,
    Reasoning,
)


class ChatDialect(OpenAiDialect):
    def __init__(
        self,
        envelope: Envelope,
        extras: Extras,
        make_parser: Callable[[], OutputParser] | None = None,
    ) -> None:
        super().__init__("chat.completion.chunk", envelope, extras)
        self._make_parser = make_parser
        self._parsers: dict[int, CountingParser] = {}
        self._shells = {
            kind: self.template(self._delta(0, {field: "\0"}))
            for kind, field in ((Content, "content"), (Reasoning, "reasoning_content"))
            if kind is Content or make_parser is not None
        }

    def body(self, choices: Sequence[Choice]) -> Json:
        bodies = [self._choice(index, choice) for index, choice in enumerate(choices)]
        usage = self._total([choice.usage for choice in choices])
        body = self.envelope.around("chat.completion", bodies, usage)
        return body | (
            {"prompt_token_ids": choices[0].prompt_tokens} if self.extras.token_ids else {}
        )

    def _choice(self, index: int, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        reason: str = choice.finished.reason
        seen: Sequence[TokenLogprobs] = ()
        if self._make_parser is not None or choice.logprobs:
            output = self._parser(index).parse_all(choice)
            reason, seen = output.reason, self._parser(index).take_logprobs()
            message["content"] = output.content if output.content or not output.calls else None
            if output.reasoning:
                message["reasoning_content"] = output.reasoning
            if output.calls:
                message["tool_calls"] = [call_body(call) for call in output.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(seen) if choice.logprobs else None,
            "finish_reason": reason,
            "matched_stop": choice.finished.matched_stop,
            **({"token_ids": choice.tokens} if self.extras.token_ids else {}),
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> Json:
        token = self.envelope.token
        return {
            "content": [
                token(at.token, at.logprob)
                | {"top_logprobs": [token(other, value) for other, value in at.top]}
                for at in logprobs
            ],
            "refusal": None,
        }

    def _delta(
        self, index: int, delta: Json, reason: str | None = None, logprobs: Json | None = None
    ) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _parser(self, index: int) -> CountingParser:
        if index not in self._parsers:
            self._parsers[index] = CountingParser(
                None if self._make_parser is None else self._make_parser(),
                self.envelope.tokenizer,
            )
        return self._parsers[index]

    def usage_at(self, index: int, answer: Answer) -> Usage:
        return self._with_reasoning(index, usage_of(answer))

    def _with_reasoning(self, index: int, usage: Usage) -> Usage:
        counted = self._parser(index).reasoning_tokens
        return (
            usage
            if counted == usage.reasoning_tokens
            else attrs.evolve(usage, reasoning_tokens=counted)
        )

    def _total(self, usages: Sequence[Usage]) -> Usage:
        return total(
            [self._with_reasoning(index, usage) for index, usage in enumerate(usages)],
            self.extras.choices,
        )

    def opening(self, index: int, answer: Answer) -> bytes:
        choice = self._delta(index, {"role": "assistant", "content": "", "refusal": None})
        if self.extras.token_ids and index == 0:
            return self.chunk(choice, answer, prompt_token_ids=answer.accepted.prompt_tokens)
        return self.chunk(choice, answer)

    def text(self, index: int, delta: Delta, answer: Answer) -> bytes:
        """Format a delta as chunks; text alone goes into the prepared shell."""
        shelled = self.plain and index == 0 and not delta.logprobs
        is_unparsed = self._make_parser is None and index not in self._parsers
        if shelled and is_unparsed:
            return self._shell(Content, delta.text) if delta.text else b""
        parser = self._parser(index)
        parsed, seen = parser.push(delta), parser.take_logprobs()
        shelled = shelled and not seen and len(parsed) == 1
        if shelled and isinstance(part := parsed[0], Content | Reasoning):
            return self._shell(type(part), part.text)
        deltas = _deltas(parsed)
        shows_tokens = bool(seen) or (self.extras.token_ids and bool(delta.tokens))
        if not deltas and shows_tokens:
            deltas = [{"content": ""}]  # Fields of tokens are sent although the text is held back.
        choices = self._scored(index, deltas, seen)
        if choices and self.extras.token_ids:
            choices[0]["token_ids"] = delta.tokens
        return b"".join(self.chunk(choice, answer) for choice in choices)

    def _scored(
        self, index: int, deltas: Sequence[Json], seen: Sequence[TokenLogprobs]
    ) -> list[Json]:
        """Log-probabilities stand beside the content."""
        scored = next((n for n, change in enumerate(deltas) if "content" in change), 0)
        return [
            self._delta(index, change, None, self._logprobs(seen) if seen and n == scored else None)
            for n, change in enumerate(deltas)
        ]

    def _shell(self, kind: type[Content | Reasoning], text: str) -> bytes:
        before, after = self._shells[kind]
        return b"".join((before, encode(text), after))

    def ending(self, index: int, finished: Finished, answer: Answer) -> bytes:
        reason: str = finished.reason
        pending: list[Json] = []
        if self._make_parser is not None:
            parser = self._parser(index)
            deltas = _deltas(parser.end(finished))
            pending = self._scored(index, deltas, parser.take_logprobs())
            reason = parser.reason(finished.reason)
        last = self._delta(index, {}, reason) | {"matched_stop": finished.matched_stop}
        return b"".join(self.chunk(chunk, answer) for chunk in [*pending, last])

    def closing(self, usages: Sequence[Usage]) -> bytes:
        return super().closing(
            [self._with_reasoning(index, usage) for index, usage in enumerate(usages)]
        )

    def heartbeat(self, index: int, answer: Answer) -> bytes:
        """Format an empty delta: LangChain's `stream_chunk_timeout` ignores comments."""
        return self.chunk(self._delta(index, {}), answer)


def _deltas(parsed: Sequence[ParsedDelta]) -> list[Json]:
    deltas: list[Json] = []
    for delta in parsed:
        match delta:
            case Content(text):
                deltas.append({"content": text})
            case Reasoning(text):
                deltas.append({"reasoning_content": text})
            case CallStarted(index, tool, id):
                deltas.append({"tool_calls": [{"index": index, **call_body(Call(tool, "", id))}]})
            case CallArguments(index, text, kind):
                more = (
                    {"custom": {"input": text}}
                    if kind == "custom"
                    else {"function": {"arguments": text}}
                )
                deltas.append({"tool_calls": [{"index": index, **more}]})
    return deltas


def call_body(call: Call) -> Json:
    if call.tool.kind == "custom":
        return {
            "id": call.id,
            "type": "custom",
            "custom": {"name": call.name, "input": call.arguments},
        }
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
