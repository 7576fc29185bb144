"""What an answer looks like on the wire: chat and completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import msgspec

from trouper.protocol.model import Tokenizer
from trouper.protocol.replies import Finished, TokenLogprobs
from trouper.web.openai.voice import Voice

Json = dict[str, Any]
encode = msgspec.json.encode


@attrs.frozen
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@attrs.frozen
class Choice:
    """One complete answer."""

    text: str
    logprobs: tuple[TokenLogprobs, ...] | None
    finished: Finished
    usage: Usage


@attrs.frozen(kw_only=True)
class Envelope:
    """What every object of one response shares."""

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
        return body if usage is None else body | {"usage": usage.body()}

    def token(self, token: int, logprob: float) -> Json:
        text = self.tokenizer.token_text(token)
        data = self.tokenizer.token_bytes(token)
        return {"token": text, "logprob": logprob, "bytes": list(data) if data else None}


class Shape(Protocol):
    """An endpoint's dialect. Chunks are whole JSON objects as bytes."""

    envelope: Envelope

    def body(self, choices: Sequence[Choice], usage: Usage) -> Json: ...

    def opening(self, index: int) -> bytes | None:
        """The chunk before the first text, if the dialect has one."""

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> list[bytes]:
        """The chunks that more text becomes; perhaps none yet."""

    def ending(self, index: int, finished: Finished) -> list[bytes]:
        """What was held back, and the last chunk."""

    def usage(self, usage: Usage) -> bytes: ...


def total(usages: Sequence[Usage], choices: int) -> Usage:
    """Of a whole response. Each prompt counts once, whatever the number of its choices."""
    firsts = usages[::choices]
    return Usage(
        sum(usage.prompt_tokens for usage in firsts),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in firsts),
    )


class ChatShape:
    """chat.completion and chat.completion.chunk. `voice` takes each answer apart, if there may be more in it than text."""

    def __init__(self, envelope: Envelope, voice: Callable[[], Voice] | None = None) -> None:
        self.envelope = envelope
        self._voice = voice
        self._voices: dict[int, Voice] = {}
        whole = encode(self._chunk(0, {"content": "\0"}))
        self._before, self._after = whole.split(encode("\0"))

    def body(self, choices: Sequence[Choice], usage: Usage) -> Json:
        return self.envelope.around(
            "chat.completion", [self._choice(index, choice) for index, choice in enumerate(choices)], usage
        )

    def _choice(self, index: int, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        reason: str = choice.finished.reason
        if self._voice is not None:
            said, reason = self._voice().whole(choice.text, choice.finished.reason)
            message |= said
        return {
            "index": index,
            "message": message,
            "logprobs": None if choice.logprobs is None else self._logprobs(choice.logprobs),
            "finish_reason": reason,
            "matched_stop": choice.finished.matched_stop,
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

    def _chunk(self, index: int, delta: Json, finish_reason: str | None = None, logprobs: Json | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self.envelope.around("chat.completion.chunk", [choice])

    def opening(self, index: int) -> bytes | None:
        return encode(self._chunk(index, {"role": "assistant", "content": "", "refusal": None}))

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> list[bytes]:
        if self._voice is not None:
            if index not in self._voices:
                self._voices[index] = self._voice()
            return self._deltas(index, self._voices[index].push(text), logprobs)
        if index == 0 and not logprobs:  # The hot path: everything but the text was encoded once.
            return [b"".join((self._before, encode(text), self._after))]
        return [encode(self._chunk(index, {"content": text}, None, self._logprobs(logprobs) if logprobs else None))]

    def _deltas(self, index: int, deltas: Sequence[Json], logprobs: Sequence[TokenLogprobs]) -> list[bytes]:
        """Log-probabilities go with the first chunk; with one of their own while the text is held back."""
        seen = self._logprobs(logprobs) if logprobs else None
        if seen is not None and not deltas:
            deltas = [{"content": ""}]
        return [encode(self._chunk(index, delta, None, None if n else seen)) for n, delta in enumerate(deltas)]

    def ending(self, index: int, finished: Finished) -> list[bytes]:
        reason: str = finished.reason
        held: list[bytes] = []
        if self._voice is not None:
            voice = self._voices.get(index) or self._voice()
            held = self._deltas(index, voice.end(), ())
            reason = voice.reason(finished.reason)
        last = self._chunk(index, {}, reason)
        last["choices"][0]["matched_stop"] = finished.matched_stop
        return [*held, encode(last)]

    def usage(self, usage: Usage) -> bytes:
        return encode(self.envelope.around("chat.completion.chunk", [], usage))


class CompletionShape:
    """text_completion, whole and in chunks, which look alike."""

    def __init__(self, envelope: Envelope) -> None:
        self.envelope = envelope
        self._offsets: dict[int, int] = {}
        whole = encode(self._object([self._choice(0, "\0", None, None)]))
        self._before, self._after = whole.split(encode("\0"))

    def _object(self, choices: list[Json], usage: Usage | None = None) -> Json:
        return self.envelope.around("text_completion", choices, usage)

    def _choice(self, index: int, text: str, finish_reason: str | None, logprobs: Json | None) -> Json:
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_reason}

    def body(self, choices: Sequence[Choice], usage: Usage) -> Json:
        bodies = [
            self._choice(
                index,
                choice.text,
                choice.finished.reason,
                None if choice.logprobs is None else self._logprobs(index, choice.logprobs),
            )
            for index, choice in enumerate(choices)
        ]
        return self._object(bodies, usage)

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> Json:
        text = self.envelope.tokenizer.token_text
        offsets = []
        for at in logprobs:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text(at.token))
        return {
            "tokens": [text(at.token) for at in logprobs],
            "token_logprobs": [at.logprob for at in logprobs],
            "top_logprobs": [{text(token): value for token, value in at.top} for at in logprobs],
            "text_offset": offsets,
        }

    def opening(self, index: int) -> bytes | None:  # noqa: ARG002 - the shape's signature
        return None

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> list[bytes]:
        if index == 0 and not logprobs:
            return [b"".join((self._before, encode(text), self._after))]
        seen = self._logprobs(index, logprobs) if logprobs else None
        return [encode(self._object([self._choice(index, text, None, seen)]))]

    def ending(self, index: int, finished: Finished) -> list[bytes]:
        return [encode(self._object([self._choice(index, "", finished.reason, None)]))]

    def usage(self, usage: Usage) -> bytes:
        return encode(self._object([], usage))
