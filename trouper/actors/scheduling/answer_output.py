from __future__ import annotations

import codecs
import logging

import attrs
from msgspec import structs

from trouper.actors.scheduling.prepared_request import PreparedRequest
from trouper.protocol.model import Tokenizer
from trouper.protocol.problems import Problem
from trouper.protocol.replies import (
    Delta,
    Finished,
    FinishReason,
    Progress,
    Scored,
    TokenLogprobs,
    joined,
)


class TextStream:
    """The growing text of one answer.

    The stop string that *completes* first wins, the longer of two, however tokens cut the text
    (F4). A possible beginning is withheld.
    """

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = stops
        self._held = ""
        self.stop: str | None = None

    def push(self, data: bytes, *, may_stop: bool = True) -> str:
        """Append bytes, and return text that is safe to send; none after a stop. Without
        `may_stop`, a completed stop string is text."""
        # The decoder is written in Python, and asked only about bytes that may be a part of a
        # character.
        new = (
            data.decode()
            if data.isascii() and not self._decoder.buffer
            else self._decoder.decode(data)
        )
        return self._show(new, may_stop=may_stop) if self._stops else new

    def flush(self) -> str:
        """End the text. A torn character becomes U+FFFD; withheld text is returned unless a stop
        completes."""
        new = self._decoder.decode(b"", final=True)
        text = self._show(new, may_stop=True) if self._stops else new
        rest, self._held = self._held, ""
        return text + rest

    def _show(self, new: str, *, may_stop: bool) -> str:
        text = self._held + new
        found = first_stop(text, self._stops, len(self._held)) if may_stop else None
        if found is not None:
            start, self.stop = found
            self._held = ""
            return text[:start]
        keep = len(text) - held_length(text, self._stops)
        self._held = text[keep:]
        return text[:keep]


def first_stop(text: str, stops: tuple[str, ...], seen: int) -> tuple[int, str] | None:
    """The (start, stop) of the stop string that completes first, beyond `seen` characters."""
    found = [
        (start + len(stop), start, stop)
        for stop in stops
        if (start := text.find(stop, max(0, seen + 1 - len(stop)))) >= 0
    ]
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


def held_length(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest tail that may begin a stop string or another marker."""
    longest = min(max(map(len, stops), default=1) - 1, len(text))
    return next(
        (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0
    )


log = logging.getLogger("trouper.scheduler")


@attrs.define(eq=False)
class AnswerOutput:
    """Sends tokens' text to the client, and alone decides that the answer ends."""

    client: PreparedRequest
    tokenizer: Tokenizer
    text: TextStream
    ends: frozenset[int]
    max_tokens: int
    """The request's maximum, or less if memory holds fewer."""
    first_token_at: float | None = None
    scores: list[TokenLogprobs] = attrs.field(factory=list)
    """Requested log-probabilities of the prompt, until the first output token."""
    num_tokens: int = 0
    stream_interval: int = 1
    """Tokens of a Delta but the first and the last, as vLLM's --stream-interval."""
    _unsent: list[Delta] = attrs.field(factory=list)

    @classmethod
    def of(
        cls, client: PreparedRequest, tokenizer: Tokenizer, stream_interval: int = 1
    ) -> AnswerOutput:
        request = client.request
        ends = frozenset(request.stop_token_ids) | (
            frozenset() if request.ignore_eos else tokenizer.eos_token_ids
        )
        if request.grammar is not None and tokenizer.grammar_end is not None:
            ends |= {tokenizer.grammar_end}
        text = TextStream(request.stop)
        return cls(
            client, tokenizer, text, ends, client.max_tokens, stream_interval=stream_interval
        )

    def append(self, token: int, logprobs: TokenLogprobs | None, now: float) -> Finished | None:
        """Send a token. Returns the `Finished` that follows, after the last text was sent."""
        self.num_tokens = count = self.num_tokens + 1
        if count == 1:
            self._begin(now)
        if token in self.ends:
            named = (
                token in self.client.request.stop_token_ids
                and token not in self.tokenizer.eos_token_ids
            )
            return self._end("stop", Delta("", (token,), (), now), token if named else None)
        push, may_stop = self.text.push, count > self.client.request.min_tokens
        text = push(self.tokenizer.token_bytes(token), may_stop=may_stop)
        delta = Delta(text, (token,), () if logprobs is None else (logprobs,), now)
        if self.text.stop is not None or count == self.max_tokens:
            return self._end("length", delta)
        if self.stream_interval == 1:
            self.client.reply(delta)
        else:
            self._hold(delta)
        return None

    def _begin(self, now: float) -> None:
        client, self.first_token_at = self.client, now
        if client.request.prompt_logprobs is not None:
            client.reply(Scored(tuple(self.scores)))
            self.scores.clear()

    def _end(self, reason: FinishReason, last: Delta, matched: int | None = None) -> Finished:
        if self.text.stop is None:
            last = structs.replace(last, text=last.text + self.text.flush())
        self._unsent.append(last)
        self.flush()
        if self.text.stop is not None:
            return Finished("stop", self.num_tokens, self.text.stop, last.at)
        return Finished(reason, self.num_tokens, matched, last.at)

    def _hold(self, delta: Delta) -> None:
        self._unsent.append(delta)
        if self.num_tokens == 1 or len(self._unsent) >= self.stream_interval:
            self.flush()
        else:
            # The limit between tokens counts from each of them.
            self.client.report(Progress(delta.at))

    def flush(self) -> None:
        if self._unsent:
            delta = joined(self._unsent)
            self._unsent.clear()
            self.client.reply(delta)

    def fail(self, problem: Problem) -> None:
        # Even if the text cannot be sent: this answer's text may have crashed the scheduler, which
        # has others to hand over.
        try:
            self.flush()
        except Exception:
            log.exception("the rest of an answer cannot be sent")
        self.client.fail(problem)
