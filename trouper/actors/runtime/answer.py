from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import Literal, NamedTuple

import attrs
import trio

from trouper.actors.runtime.submission import Arrivals
from trouper.protocol.plan_channel import ClosesAtEnd
from trouper.protocol.problems import Problem, RequestFailed, retry_after_s
from trouper.protocol.record import Reason, RequestRecord
from trouper.protocol.replies import (
    Accepted,
    Delta,
    Embedded,
    Failed,
    Finished,
    Progress,
    Reply,
    Scored,
    Started,
    TokenLogprobs,
)
from trouper.protocol.requests import Timeouts
from trouper.protocol.settings import Settings
from trouper.protocol.waits import History
from trouper.protocol.watch import Watch

Phase = Literal["preparation", "queue", "prefill", "decode"]
Code = Literal[
    "preparation_timeout",
    "queue_timeout",
    "first_token_timeout",
    "token_timeout",
    "request_timeout",
]


class Deadline(NamedTuple):
    """`at`: trio.current_time() at which the request is too late."""

    at: float
    seconds: float
    code: Code
    flag: str
    waited: str = ""

    @property
    def problem(self) -> Problem:
        message = {
            "preparation_timeout": self.waited,
            "queue_timeout": self.waited,
            "first_token_timeout": f"the prefill made no progress within {self.seconds:g} s",
            "token_timeout": f"no further token came within {self.seconds:g} s",
            "request_timeout": f"the request took longer than {self.seconds:g} s",
        }[self.code]
        is_early = self.code in ("preparation_timeout", "queue_timeout")
        # A client that waited too long should wait as long again before its next try.
        status, retry_s = (503, retry_after_s(self.seconds)) if is_early else (504, None)
        return Problem(
            status,
            f"{message} ({self.flag})",
            "timeout_error",
            code=self.code,
            retry_after_s=retry_s,
        )


@attrs.define
class TimeLimits:
    timeouts: Timeouts
    began: float
    """trio.current_time() at submission."""
    progress: Watch[Progress] = attrs.field(factory=lambda: Watch(Progress()))
    history: History = attrs.field(factory=History)
    phase: Phase = "preparation"
    _phase_began: float = attrs.field(
        default=attrs.Factory(lambda self: self.began, takes_self=True)
    )

    def enter(self, phase: Phase, now: float) -> None:
        """Begin a phase, or the wait for the next token. Time in the queue counts from the
        submission."""
        self.phase, self._phase_began = phase, now

    def next_deadline(self, *, reply_waits: bool = False) -> Deadline:
        """The first limit without further progress. `reply_waits`: a reply has arrived in time, so
        only the total limit applies."""
        limits = self.timeouts
        request = _deadline(self.began, limits.request_s, "request_timeout", "--request-timeout-s")
        if reply_waits:
            return request
        match self.phase:
            case "preparation" | "queue":
                phase = self._until_row()
            case "prefill":
                phase = _deadline(
                    self._since,
                    limits.first_token_s,
                    "first_token_timeout",
                    "--first-token-timeout-s",
                )
            case "decode":
                phase = _deadline(
                    self._since, limits.between_tokens_s, "token_timeout", "--token-timeout-s"
                )
        return min(phase, request, key=lambda deadline: deadline.at)

    def _until_row(self) -> Deadline:
        seconds, last = self.timeouts.queue_s or 0.0, self.history.latest
        if self.phase == "preparation":
            is_prepared = last is not None and last.reason not in ("", "tokenizing", "grammar")
            code: Code = "queue_timeout" if is_prepared else "preparation_timeout"
            reason = "" if last is None else last.waits_for
            waited = f"the request waited {seconds:g} s for {reason or 'the server to take it in'}"
        else:
            code, prepared_s = "queue_timeout", self._phase_began - self.began
            share = (
                f", {prepared_s:.0f} s of which it was being prepared" if prepared_s >= 1 else ""
            )
            waited = f"the request was given no row within {seconds:g} s{share}"
            if last is not None and last.reason:
                waited += f"; it waited for {last.waits_for}"
        limit = _deadline(self._since, seconds, code, "--queue-timeout-s")
        return limit._replace(waited=waited)

    @property
    def _since(self) -> float:
        progress = self.progress.latest
        began = self.began if self.phase in ("preparation", "queue") else self._phase_began
        return trio.current_time() if progress.preempted else max(began, progress.at)


def _deadline(since: float, seconds: float | None, code: Code, flag: str) -> Deadline:
    return Deadline(since + (seconds or inf), seconds or 0.0, code, flag)


def default_timeouts(settings: Settings) -> Timeouts:
    return Timeouts(
        queue_s=settings.queue_timeout_s or None,
        first_token_s=settings.first_token_timeout_s or None,
        between_tokens_s=settings.token_timeout_s or None,
        request_s=settings.request_timeout_s or None,
    )


Ended = Callable[[RequestRecord], None]
# As nginx names a request that its client gave up.
CANCELLED = Problem(499, "the request was cancelled", "request_cancelled", code="cancelled")


@attrs.define(eq=False)
class Answer(ClosesAtEnd):
    """The client's end of one request. Closing an answer (or leaving its `with`) aborts the
    request: the row ends within one step. Exceeding a time limit raises `RequestFailed` with the
    limit's code. The caller may add timeouts."""

    request_id: str
    accepted: Accepted
    _replies: trio.MemoryReceiveChannel[Reply]
    _limits: TimeLimits
    cached_tokens: int = 0
    completion_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Requested log-probabilities of the prompt, with the first Delta."""
    embedding: bytes = b""
    """Requested vector of the prompt as little-endian float32, at the end."""
    finished: Finished | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    problem: Problem | None = None
    _ended: Ended | None = None
    _disk_tokens: int = 0
    # Number of arrived tokens that were unread at the close.
    _unread_tokens: int = 0
    _cancelled: bool = False
    _arrivals: Arrivals = attrs.field(factory=Arrivals)
    history: History = attrs.field(
        default=attrs.Factory(lambda self: self._limits.history, takes_self=True), init=False
    )
    # Replies before those in the channel.
    _unread: deque[Reply] = attrs.field(init=False)

    @_unread.default
    def _unread_of_arrivals(self) -> deque[Reply]:
        return self._arrivals.unread

    @property
    def progress(self) -> Progress:
        return self._limits.progress.latest

    @property
    def queued(self) -> bool:
        return self._limits.phase in ("preparation", "queue")

    async def wait_accepted(self) -> None:
        """Wait until the request is in the queue. Must be called first, and once. Raises
        `RequestFailed` (400, 429, 503)."""
        with self.ends_with_failure():
            match await self.receive_reply():
                case Accepted() as accepted:
                    self.accepted = accepted
                    self._limits.enter("queue", trio.current_time())
                case Failed(problem=problem):
                    raise RequestFailed(problem)
                case reply:
                    raise AssertionError(f"{reply!r} before Accepted")

    @contextmanager
    def ends_with_failure(self) -> Iterator[None]:
        """Close the answer if the body fails or is cancelled; a problem is recorded."""
        try:
            yield
        except RequestFailed as failed:
            # From Python 3.13 on, the frames of its traceback refer to it: the prompt that they
            # hold would be left to the garbage collector.
            failed.with_traceback(None)
            raise self._failed(failed.problem) from None
        except BaseException:
            self.close()
            raise

    async def next(self) -> Delta | Finished:
        """The next Delta, or the end. Raises `RequestFailed`. Safe to cancel."""
        while self.finished is None:
            reply = await self.receive_reply()
            match reply:
                case Started():
                    self._start(reply)
                case Embedded(vector=vector):
                    self.embedding = vector
                case Scored(logprobs=logprobs):
                    self.prompt_logprobs = logprobs
                case Delta():
                    self.completion_tokens += len(reply.tokens)
                    self._note_token_time(reply.at)
                    self._limits.enter("decode", trio.current_time())
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

    async def wait_next(self) -> None:
        """Wait for a reply beyond `Started`, and leave the reply to `next`. Safe to cancel."""
        while self.finished is None and not self._unread:
            reply = await self.receive_reply()
            if isinstance(reply, Started):
                self._start(reply)
            else:
                self._unread.appendleft(reply)

    def next_nowait(self) -> Delta | None:
        """A Delta that already arrived, else None; never a terminal event."""
        if self.finished is None:
            with suppress(trio.EndOfChannel, trio.ClosedResourceError):
                self._receive_waiting()
        deltas = self.take_deltas(1, trio.current_time())
        return deltas[0] if deltas else None

    def take_deltas(self, limit: int, now: float) -> list[Delta]:
        """At most `limit` Deltas that already arrived at a followed answer. `now`:
        trio.current_time()."""
        unread = self._unread
        # `list[Delta]()` would take as long as the rest of this, for each token of each stream.
        deltas: list[Delta] = []
        while unread and len(deltas) < limit and isinstance(delta := unread[0], Delta):
            deltas.append(delta)
            self.completion_tokens += len(delta.tokens)
            unread.popleft()
        if deltas:
            if self.first_token_at is None:
                self.first_token_at = deltas[0].at
            self.last_token_at = deltas[-1].at
            self._limits.enter("decode", now)
        return deltas

    @property
    def waiting(self) -> int:
        return len(self._unread) + self._replies.statistics().current_buffer_used

    @property
    def has_other(self) -> bool:
        """Whether `next` has something other than a Delta, after all Deltas were taken."""
        return bool(self._unread) or self._cancelled

    @property
    def deadline(self) -> float:
        """trio.current_time() at which the answer is late, unless there is progress."""
        return self._limits.next_deadline().at

    def follow(self, follower: Callable[[], None] | None) -> None:
        """Call `follower` with each reply, in the sender's task: no blocking, no exception. None:
        nobody."""
        self._arrivals.follower = None
        if follower is None:
            return
        try:
            while True:
                self._unread.append(self._replies.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            self._arrivals.follower = follower
        except trio.ClosedResourceError:  # The answer was closed: nothing arrives any more.
            pass

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Delta:
        piece = await self.next()
        if isinstance(piece, Finished):
            raise StopAsyncIteration
        return piece

    def close(self) -> None:
        """Abort the request, unless ended. Synchronous and idempotent; an abort cannot be lost."""
        ended, self._ended = self._ended, None
        last = None if ended is None else self._read_rest()
        self._arrivals.follower = None
        self._replies.close()
        if ended is not None:
            self.history.end()
            ended(self._record(last))

    def cancel(self) -> None:
        """Abort the request from another task. The reader gets the code `cancelled`."""
        if self.finished is None:
            self._cancelled = True
            self.problem = self.problem or CANCELLED
            follower = self._arrivals.follower
            self.close()
            if follower is not None:
                follower()

    # -- progress and end -------------------------------------------------------------------------

    def _start(self, started: Started) -> None:
        self._note_start(started)
        self._limits.enter("prefill", trio.current_time())

    def _note_start(self, started: Started) -> None:
        self.cached_tokens, self._disk_tokens = started.cached_tokens, started.disk_tokens
        self.admitted_at = started.at

    def _note_token_time(self, at: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = at
        self.last_token_at = at

    def _failed(self, problem: Problem) -> RequestFailed:
        self.problem = problem
        self.close()
        return RequestFailed(problem)

    def _read_rest(self) -> Finished | Failed | None:
        """Read the remaining replies, so that a slow reader does not shorten the record."""
        last: Finished | Failed | None = None
        with suppress(trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
            while True:
                match self._unread.popleft() if self._unread else self._replies.receive_nowait():
                    case Started() as started:
                        self._note_start(started)
                    case Delta(tokens=tokens, at=at):
                        self._unread_tokens += len(tokens)
                        self._note_token_time(at)
                    case Accepted() as accepted:
                        self.accepted = accepted
                    case Finished() | Failed() as end:
                        last = end
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
            arrived_at=self._limits.began,
            admitted_at=self.admitted_at,
            first_token_at=self.first_token_at,
            last_token_at=self.last_token_at,
            ended_at=trio.current_time(),
            preempted_s=self.history.preempted_s,
            transitions=tuple(self.history.transitions),
        )

    def _outcome(self, unread: Finished | Failed | None) -> tuple[Reason, str]:
        end = self.finished or unread
        problem = self.problem or (end.problem if isinstance(end, Failed) else None)
        if problem is not None:
            kind: Reason = (
                "abort"
                if problem is CANCELLED
                else "error"
                if self.accepted.prompt_tokens
                else "refused"
            )
            return kind, problem.code or problem.type
        return (end.reason, "") if isinstance(end, Finished) else ("abort", "")

    async def receive_reply(self) -> Reply:
        # A reply that has arrived is not late: its reader was slow, and only the limit of the
        # entire request applies. Nor is a request late that made progress since the deadline was
        # set.
        passed = -inf
        try:
            self._receive_waiting()
            deadline = self._limits.next_deadline(reply_waits=bool(self._unread))
            if self._unread and trio.current_time() < deadline.at:
                await trio.lowlevel.checkpoint()
                if not self._unread:  # The answer was closed meanwhile.
                    raise trio.ClosedResourceError
                return self._unread.popleft()
            while not self._unread and deadline.at > passed:
                with trio.move_on_at(deadline.at):
                    return await self._replies.receive()
                passed, deadline = deadline.at, self._limits.next_deadline()
        except trio.EndOfChannel:
            raise AssertionError(
                f"{self.request_id}: the owner left without a terminal event"
            ) from None
        except trio.ClosedResourceError:
            if not self._cancelled:
                raise
            raise RequestFailed(CANCELLED) from None
        raise self._failed(deadline.problem)

    def _receive_waiting(self) -> None:
        if not self._unread:
            with suppress(trio.WouldBlock):
                self._unread.append(self._replies.receive_nowait())
