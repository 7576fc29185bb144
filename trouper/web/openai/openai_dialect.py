"""The format that chat and completions share: envelope, usage, stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import msgspec

from trouper.actors.runtime.answer import Answer
from trouper.protocol.model import Tokenizer
from trouper.protocol.problems import Problem
from trouper.web.http.json_response import error_body
from trouper.web.openai.parameters import StreamOptions
from trouper.web.output.dialect import COMMENT, Json, Usage, event, total, usage_of

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


def usage_body(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


@attrs.frozen(kw_only=True)
class Envelope:
    id: str
    created: int
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    tokens_as_ids: bool = False
    """Whether log-probabilities name tokens as vLLM's `return_tokens_as_token_ids` does."""

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

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.tokens_as_ids else self.tokenizer.token_text(token)

    def token(self, token: int, logprob: float) -> Json:
        data = self.tokenizer.token_bytes(token)
        return {
            "token": self.name(token),
            "logprob": logprob,
            "bytes": list(data) if data else None,
        }


@attrs.frozen
class Extras:
    stream: StreamOptions
    token_ids: bool
    choices: int


class OpenAiDialect:
    def __init__(self, kind: str, envelope: Envelope, extras: Extras) -> None:
        self.kind = kind
        self.envelope = envelope
        self.extras = extras
        self.plain = not (extras.token_ids or extras.stream.continuous_usage_stats)
        """Whether a chunk of text carries only text."""

    def chunk(self, choice: Json, answer: Answer, **more: Any) -> bytes:
        usage = (
            self.counted(self.usage_at(choice["index"], answer))
            if self.extras.stream.continuous_usage_stats
            else None
        )
        return event(encode(self._around(choice, usage) | more))

    def _around(self, choice: Json, usage: Usage | None = None) -> Json:
        """Every chunk has `usage` if the client asked for the last one's, as in OpenAI's API."""
        body = self.envelope.around(self.kind, [choice], usage)
        if self.extras.stream.include_usage:
            body.setdefault("usage", None)
        return body

    def usage_at(self, _index: int, answer: Answer) -> Usage:
        return usage_of(answer)

    def counted(self, usage: Usage) -> Usage:
        return usage

    def template(self, choice: Json) -> tuple[bytes, bytes]:
        """Return the bytes around an event's text: the hot path encodes only text."""
        before, after = event(encode(self._around(choice))).split(encode("\0"))
        return before, after

    def closing(self, usages: Sequence[Usage]) -> bytes:
        if not self.extras.stream.include_usage:
            return DONE
        usage = self.counted(total(usages, self.extras.choices))
        return event(encode(self.envelope.around(self.kind, [], usage))) + DONE

    def failure(self, problem: Problem) -> bytes:
        return event(encode(error_body(problem)))

    def heartbeat(self, _index: int, _answer: Answer) -> bytes:
        """Format a comment: benchmarks count each chunk as a token."""
        return COMMENT


def token_text_of(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return special tokens by name, invalid UTF-8 as U+FFFD."""
    data = (
        tokenizer.token_bytes(token) or tokenizer.token_text(token).encode() for token in tokens
    )
    return b"".join(data).decode("utf-8", "replace")
