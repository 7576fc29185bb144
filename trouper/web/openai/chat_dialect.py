"""Formatting of answers on the wire: chat and completions, complete and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import msgspec

from trouper.actors.runtime.answer import Answer
from trouper.protocol.model import Tokenizer
from trouper.protocol.problems import Problem
from trouper.protocol.replies import Delta, Finished, TokenLogprobs
from trouper.web.openai.errors import error_body
from trouper.web.openai.parameters import Parameters, StreamOptions
from trouper.web.output.dialect import COMMENT, Choice, Json, Usage, event, total, usage_of
from trouper.web.output.output_parser import OutputParser, ParsedDelta
from trouper.web.output.tool_calls import Call

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


def usage_body(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@attrs.frozen(kw_only=True)
class Envelope:
    """The fields that all objects of one response share."""

    id: str
    created: int
    model: str
    fingerprint: str
    tokenizer: Tokenizer

    def around(self, kind: str, choices: list[Json], usage: Usage | None = None) -> Json:
        body: Json = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
        return body if usage is None else body | {"usage": usage_body(usage)}

    def token(self, token: int, logprob: float) -> Json:
        text = self.tokenizer.token_text(token)
        data = self.tokenizer.token_bytes(token)
        return {"token": text, "logprob": logprob, "bytes": list(data) if data else None}


@attrs.frozen
class Extras:
    """Additional output that a request asks for."""

    stream: StreamOptions
    token_ids: bool
    choices: int
    """Number of answers that were generated for each prompt."""

    @classmethod
    def of(cls, parameters: Parameters, options: StreamOptions, choices: int) -> Extras:
        return cls(options, parameters.return_token_ids, choices)


class OpenAiDialect:
    """The stream format that both endpoints share."""

    def __init__(self, kind: str, envelope: Envelope, extras: Extras) -> None:
        self.kind = kind
        self.envelope = envelope
        self.extras = extras
        self.plain = not (extras.token_ids or extras.stream.continuous_usage_stats)
        """Whether a chunk of text carries nothing but text."""

    def chunk(self, choice: Json, answer: Answer, **more: Any) -> bytes:
        usage = self.counted(usage_of(answer)) if self.extras.stream.continuous_usage_stats else None
        return event(encode(self.envelope.around(self.kind, [choice], usage) | more))

    def counted(self, usage: Usage) -> Usage:
        """Return the usage as it is reported."""
        return usage

    def template(self, choice: Json) -> tuple[bytes, bytes]:
        r"""Return the bytes before and after the text of an event, so that on the hot path only the text is encoded."""
        before, after = event(encode(self.envelope.around(self.kind, [choice]))).split(encode("\0"))
        return before, after

    def closing(self, usages: Sequence[Usage]) -> bytes:
        if not self.extras.stream.include_usage:
            return DONE
        usage = self.counted(total(usages, self.extras.choices))
        return event(encode(self.envelope.around(self.kind, [], usage))) + DONE

    def failure(self, problem: Problem) -> bytes:
        return event(encode(error_body(problem)))

    def heartbeat(self) -> bytes:
        return COMMENT


class ChatDialect(OpenAiDialect):
    """chat.completion and chat.completion.chunk. `make_parser` makes a parser for each answer, if an answer may hold
    more than text."""

    def __init__(
        self, envelope: Envelope, extras: Extras, make_parser: Callable[[], OutputParser] | None = None
    ) -> None:
        super().__init__("chat.completion.chunk", envelope, extras)
        self._make_parser = make_parser
        self._parsers: dict[int, OutputParser] = {}
        self._before, self._after = self.template(self._delta(0, {"content": "\0"}))

    def body(self, choices: Sequence[Choice]) -> Json:
        usage = total([choice.usage for choice in choices], self.extras.choices)
        body = self.envelope.around(
            "chat.completion", [self._choice(index, choice) for index, choice in enumerate(choices)], usage
        )
        return body | ({"prompt_token_ids": choices[0].prompt_tokens} if self.extras.token_ids else {})

    def _choice(self, index: int, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        reason: str = choice.finished.reason
        if self._make_parser is not None:
            output = self._make_parser().parse_all(choice.text, reason)
            reason = output.reason
            message["content"] = output.content if output.content or not output.calls else None
            if output.reasoning:
                message["reasoning_content"] = output.reasoning
            if output.calls:
                message["tool_calls"] = [call_body(call) for call in output.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs) if choice.logprobs else None,
            "finish_reason": reason,
            "matched_stop": choice.finished.matched_stop,
            **({"token_ids": choice.tokens} if self.extras.token_ids else {}),
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> Json:
        token = self.envelope.token
        return {
            "content": [
                token(at.token, at.logprob) | {"top_logprobs": [token(other, value) for other, value in at.top]}
                for at in logprobs
            ],
            "refusal": None,
        }

    def _delta(self, index: int, delta: Json, reason: str | None = None, logprobs: Json | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int, answer: Answer) -> bytes:
        choice = self._delta(index, {"role": "assistant", "content": "", "refusal": None})
        if self.extras.token_ids and index == 0:
            return self.chunk(choice, answer, prompt_token_ids=answer.accepted.prompt_tokens)
        return self.chunk(choice, answer)

    def text(self, index: int, delta: Delta, answer: Answer) -> bytes:
        if self._make_parser is None and self.plain and index == 0 and not delta.logprobs:
            return b"".join((self._before, encode(delta.text), self._after)) if delta.text else b""
        deltas: list[Json] = [{"content": delta.text}] if delta.text else []
        if self._make_parser is not None:
            if index not in self._parsers:
                self._parsers[index] = self._make_parser()
            deltas = self._deltas(index, self._parsers[index].push(delta.text))
        seen = self._logprobs(delta.logprobs) if delta.logprobs else None
        if not deltas and (seen is not None or (self.extras.token_ids and delta.tokens)):
            deltas = [{"content": ""}]  # Fields of tokens are sent although the text is held back.
        choices = [self._delta(index, change, None, None if n else seen) for n, change in enumerate(deltas)]
        if choices and self.extras.token_ids:
            choices[0]["token_ids"] = delta.tokens
        return b"".join(self.chunk(choice, answer) for choice in choices)

    def _deltas(self, index: int, parsed: Sequence[ParsedDelta]) -> list[Json]:
        deltas: list[Json] = []
        calls = self._parsers[index].calls - sum(delta.call is not None for delta in parsed)
        for delta in parsed:
            if delta.call is not None:
                deltas.append({"tool_calls": [{"index": calls, **call_body(delta.call)}]})
                calls += 1
            else:
                deltas.append({"content" if delta.kind == "content" else "reasoning_content": delta.text})
        return deltas

    def ending(self, index: int, finished: Finished, answer: Answer) -> bytes:
        reason: str = finished.reason
        held: list[Json] = []
        if self._make_parser is not None:
            parser = self._parsers.setdefault(index, self._make_parser())
            held = self._deltas(index, parser.end())
            reason = parser.reason(finished.reason)
        last = self._delta(index, {}, reason) | {"matched_stop": finished.matched_stop}
        return b"".join(self.chunk(chunk, answer) for chunk in [*(self._delta(index, delta) for delta in held), last])


def call_body(call: Call) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class CompletionDialect(OpenAiDialect):
    """text_completion, complete and in chunks, which look alike.

    `echo`: the prompt stands before each answer; `scores`: with its log-probabilities. `silent`: only the prompt was
    asked for (max_tokens 0); tokens that were computed after it are not shown. `pick` chooses the returned answers
    among all that were generated.
    """

    def __init__(
        self,
        envelope: Envelope,
        extras: Extras,
        *,
        echo: Callable[[int], str] | None,
        scores: bool,
        silent: bool,
        pick: Callable[[Sequence[Choice]], Sequence[Choice]],
    ) -> None:
        super().__init__("text_completion", envelope, extras)
        self._echo, self._scores, self._silent, self._pick = echo, scores, silent, pick
        self._offsets: dict[int, int] = {}
        self._before, self._after = self.template(self._choice(0, "\0", None, None))

    def _choice(
        self, index: int, text: str, reason: str | None, logprobs: Json | None, matched: str | int | None = None
    ) -> Json:
        choice: Json = {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}
        return choice | ({"matched_stop": matched} if reason is not None else {})

    def body(self, choices: Sequence[Choice]) -> Json:
        usage = self.counted(total([choice.usage for choice in choices], self.extras.choices))
        bodies = [self._choice_body(index, choice) for index, choice in enumerate(self._pick(choices))]
        return self.envelope.around("text_completion", bodies, usage)

    def counted(self, usage: Usage) -> Usage:
        return attrs.evolve(usage, completion_tokens=0) if self._silent else usage

    def _ended(self, finished: Finished) -> Finished:
        """Return how the answer ended. Tokens that are not shown do not end it."""
        return Finished("length", 0) if self._silent else finished

    def _choice_body(self, index: int, choice: Choice) -> Json:
        text = "" if self._silent else choice.text
        seen: list[TokenLogprobs | int] = [] if self._silent else [*choice.logprobs]
        if self._echo is not None:
            text = self._echo(index) + text
            if self._scores:
                seen = [choice.prompt_tokens[0], *choice.prompt_logprobs, *seen]
        logprobs = self._logprobs(index, seen) if seen else None
        finished = self._ended(choice.finished)
        body = self._choice(index, text, finished.reason, logprobs, finished.matched_stop)
        if self.extras.token_ids:
            body |= {"token_ids": () if self._silent else choice.tokens, "prompt_token_ids": choice.prompt_tokens}
        return body

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs | int]) -> Json:
        """Format log-probabilities. A bare token is the prompt's first, which has none because nothing comes before it."""
        text = self.envelope.tokenizer.token_text
        tokens = [text(at if isinstance(at, int) else at.token) for at in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if isinstance(at, int) else at.logprob for at in logprobs],
            "top_logprobs": [
                None if isinstance(at, int) else {text(token): value for token, value in at.top} for at in logprobs
            ],
            "text_offset": offsets,
        }

    def opening(self, index: int, answer: Answer) -> bytes:
        """Format the prompt, if requested; with log-probabilities its text comes with the first token."""
        text = "" if self._echo is None or self._scores else self._echo(index)
        if not (text or self.extras.token_ids):
            return b""
        choice = self._choice(index, text, None, None)
        if self.extras.token_ids:
            choice |= {"token_ids": (), "prompt_token_ids": answer.accepted.prompt_tokens}
        return self.chunk(choice, answer)

    def text(self, index: int, delta: Delta, answer: Answer) -> bytes:
        if self.plain and index == 0 and not delta.logprobs and not self._silent:
            return b"".join((self._before, encode(delta.text), self._after)) if delta.text else b""
        held = self._prompt(index, answer)
        seen = self._logprobs(index, delta.logprobs) if delta.logprobs else None
        if self._silent or not (delta.text or seen or self.extras.token_ids):
            return held
        choice = self._choice(index, delta.text, None, seen)
        if self.extras.token_ids:
            choice["token_ids"] = delta.tokens
        return held + self.chunk(choice, answer)

    def _prompt(self, index: int, answer: Answer) -> bytes:
        """Format the prompt with its log-probabilities, once, before the first text."""
        if self._echo is None or not self._scores or index in self._offsets:
            return b""
        seen = self._logprobs(index, [answer.accepted.prompt_tokens[0], *answer.prompt_logprobs])
        return self.chunk(self._choice(index, self._echo(index), None, seen), answer)

    def ending(self, index: int, finished: Finished, answer: Answer) -> bytes:
        ended = self._ended(finished)
        last = self._choice(index, "", ended.reason, None, ended.matched_stop)
        return self._prompt(index, answer) + self.chunk(last, answer)


def token_text_of(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return readable text: special tokens by name, invalid UTF-8 as U+FFFD."""
    data = (tokenizer.token_bytes(token) or tokenizer.token_text(token).encode() for token in tokens)
    return b"".join(data).decode("utf-8", "replace")
