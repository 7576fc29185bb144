"""The client's end of one request: its replies, its time limits and its record."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf
from types import TracebackType
from typing import Literal, Self

import attrs
import trio

from trouper.protocol.problems import Problem, RequestFailed
from trouper.protocol.record import Reason, RequestRecord
from trouper.protocol.replies import Accepted, Delta, Embedded, Failed, Finished, Reply, Scored, Started, TokenLogprobs
from trouper.protocol.requests import Timeouts

Ended = Callable[[RequestRecord], None]
CANCELLED = Problem(499, "the request was cancelled", "request_cancelled", None, "cancelled")
"""499 is what nginx calls a request that its client gave up."""


def timed_out(kind: str, seconds: float, param: str) -> Problem:
    status = 503 if kind == "queue_timeout" else 504
    said = {
        "queue_timeout": f"no row became free within {seconds:g} s",
        "first_token_timeout": f"the first token did not come within {seconds:g} s",
        "token_timeout": f"no further token came within {seconds:g} s",
        "request_timeout": f"the request took longer than {seconds:g} s",
    }[kind]
    retry = 1 if status == 503 else None
    return Problem(status, f"{said} ({param})", "timeout_error", None, kind, retry)


@attrs.define(eq=False)
class Answer:
    """The client's end of one request. Closing it (or leaving its `with`) aborts the request: the row ends within one step.

    An answer enforces its own time limits: each phase (queue, prefill, between tokens) and the whole have their limit,
    and meeting one raises `RequestFailed` with its own code. The caller may add its own timeouts.
    """

    request_id: str
    accepted: Accepted
    _replies: trio.MemoryReceiveChannel[Reply]
    _timeouts: Timeouts
    _began: float
    """trio.current_time() at submission."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt, available with the first Delta, if requested."""
    embedding: bytes = b""
    """Vector of the prompt as little-endian float32, available at the end, if requested."""
    finished: Finished | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    """Time of the last token, as set by the scheduler."""
    problem: Problem | None = None
    """Problem that ended the request."""
    _ended: Ended | None = None
    _disk_tokens: int = 0
    _unread_tokens: int = 0
    """Number of tokens that arrived and were not read before the answer was closed."""
    _cancelled: bool = False
    _kept: Reply | None = None
    """A received reply that was not returned to the reader yet."""
    _phase: Literal["queue", "prefill", "decode"] = "queue"
    _phase_began: float = attrs.field(factory=trio.current_time)

    @property
    def queued(self) -> bool:
        """Whether the request waits for a row, according to the replies that were read."""
        return self._phase == "queue"

    async def next(self) -> Delta | Finished:
        """The next Delta, or the end, which is returned again by further calls. Raises `RequestFailed`. Safe to cancel."""
        while self.finished is None:
            reply = await self.receive_reply()
            match reply:
                case Started():
                    self._start(reply)
                    self._enter("prefill")
                case Embedded(vector=vector):
                    self.embedding = vector
                case Scored(logprobs=logprobs):
                    self.prompt_logprobs = logprobs
                case Delta(tokens=tokens):
                    self.completion_tokens += len(tokens)
                    self._date(reply.at)
                    self._enter("decode")
                    return reply
                case Finished():
                    self.finished = reply
                    self.completion_tokens = reply.completion_tokens
                    self.close()
                case Failed(problem=problem):
                    raise self._failed(problem)
                case Accepted():
                    raise AssertionError("accepted twice")
        return self.finished

    def next_nowait(self) -> Delta | None:
        """A Delta that already arrived, else None. It lets a writer combine several Deltas, and is never a terminal event."""
        if self._kept is None and self.finished is None:
            try:
                self._kept = self._replies.receive_nowait()
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                return None
        if not isinstance(self._kept, Delta):
            return None
        delta, self._kept = self._kept, None
        self.completion_tokens += len(delta.tokens)
        self._date(delta.at)
        self._enter("decode")
        return delta

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Delta:
        piece = await self.next()
        if isinstance(piece, Finished):
            raise StopAsyncIteration
        return piece

    def close(self) -> None:
        """Abort the request, if it has not ended. Synchronous and idempotent; an abort cannot be lost."""
        ended, self._ended = self._ended, None
        last = None if ended is None else self._unread()
        self._replies.close()
        if ended is not None:
            ended(self._record(last))

    def cancel(self) -> None:
        """Abort the request from another task. The reader of the answer gets the code `cancelled`."""
        if self.finished is None:
            self._cancelled = True
            self.problem = self.problem or CANCELLED
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what becomes of it ------------------------------------------------------------------------

    def _start(self, started: Started) -> None:
        self.cached_tokens, self._disk_tokens = started.cached_tokens, started.disk_tokens
        self.admitted_at = started.at

    def _date(self, at: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = at
        self.last_token_at = at

    def _failed(self, problem: Problem) -> RequestFailed:
        self.problem = problem
        self.close()
        return RequestFailed(problem)

    def _unread(self) -> Finished | Failed | None:
        """Read the remaining replies for the record, so that a slow reader does not make the recorded answer shorter than it was."""
        last: Finished | Failed | None = None
        with suppress(trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
            while True:
                match self._kept or self._replies.receive_nowait():
                    case Started() as started:
                        self._start(started)
                    case Delta(tokens=tokens, at=at):
                        self._unread_tokens += len(tokens)
                        self._date(at)
                    case Accepted() as accepted:
                        self.accepted = accepted
                    case Finished() | Failed() as end:
                        last = end
                self._kept = None
        return last

    def _record(self, unread: Finished | Failed | None) -> RequestRecord:
        reason, code = self._outcome(unread)
        return RequestRecord(
            request_id=self.request_id,
            reason=reason,
            code=code,
            prompt_tokens=len(self.accepted.prompt_tokens),
            cached_tokens=self.cached_tokens,
            disk_tokens=self._disk_tokens,
            generated_tokens=self.completion_tokens + self._unread_tokens,
            max_tokens=self.accepted.max_tokens,
            arrived_at=self._began,
            admitted_at=self.admitted_at,
            first_token_at=self.first_token_at,
            last_token_at=self.last_token_at,
            ended_at=trio.current_time(),
        )

    def _outcome(self, unread: Finished | Failed | None) -> tuple[Reason, str]:
        end = self.finished or unread
        problem = self.problem or (end.problem if isinstance(end, Failed) else None)
        if problem is not None:
            kind: Reason = "abort" if problem is CANCELLED else "error" if self.accepted.prompt_tokens else "refused"
            return kind, problem.code or problem.type
        return (end.reason, "") if isinstance(end, Finished) else ("abort", "")

    def _enter(self, phase: Literal["prefill", "decode"]) -> None:
        self._phase, self._phase_began = phase, trio.current_time()

    async def receive_reply(self) -> Reply:
        """The next reply. A reply that has already arrived is not late: its reader was slow, and only the limit of the whole request
        applies."""
        try:
            self._look()
            deadline, limit, kind, flag = self._limits()
            with trio.move_on_at(deadline):
                if self._kept is None:
                    self._kept = await self._replies.receive()
                else:
                    await trio.lowlevel.checkpoint()
                kept, self._kept = self._kept, None
                return kept
        except trio.EndOfChannel:
            raise AssertionError(f"{self.request_id}: the owner left without a terminal event") from None
        except trio.ClosedResourceError:
            if not self._cancelled:
                raise
            raise RequestFailed(CANCELLED) from None
        raise self._failed(timed_out(kind, limit, flag))

    def _look(self) -> None:
        if self._kept is None:
            with suppress(trio.WouldBlock):
                self._kept = self._replies.receive_nowait()

    def _limits(self) -> tuple[float, float, str, str]:
        """The (deadline, seconds, code, flag) of the limit that comes first."""
        limits = self._timeouts
        whole = (self._began, limits.request_s, "request_timeout", "--request-timeout-s")
        in_phase = {
            "queue": (self._phase_began, limits.queue_s, "queue_timeout", "--queue-timeout-s"),
            "prefill": (self._phase_began, limits.first_token_s, "first_token_timeout", "--first-token-timeout-s"),
            "decode": (self._phase_began, limits.between_tokens_s, "token_timeout", "--token-timeout-s"),
        }[self._phase]
        counting = (whole,) if self._kept is not None else (in_phase, whole)
        return min((since + (s or inf), s or 0.0, kind, flag) for since, s, kind, flag in counting)
