"""The client's end of one request: its replies, and the record of its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from types import TracebackType
from typing import Self

import attrs
import trio

from trouper.actors.runtime.submission import Arrivals
from trouper.actors.runtime.time_limits import TimeLimits
from trouper.protocol.problems import Problem, RequestFailed
from trouper.protocol.record import Reason, RequestRecord
from trouper.protocol.replies import Accepted, Delta, Embedded, Failed, Finished, Reply, Scored, Started, TokenLogprobs

Ended = Callable[[RequestRecord], None]
CANCELLED = Problem(499, "the request was cancelled", "request_cancelled", code="cancelled")
"""499 is what nginx calls a request that its client gave up."""


@attrs.define(eq=False)
class Answer:
    """The client's end of one request. Closing it (or leaving its `with`) aborts the request: the row ends within one step.

    An answer enforces its time limits (time_limits.py): meeting one raises `RequestFailed` with the limit's code. The caller may add
    timeouts.
    """

    request_id: str
    accepted: Accepted
    _replies: trio.MemoryReceiveChannel[Reply]
    _limits: TimeLimits
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
    _unreturned: Reply | None = None
    """A received reply that was not returned to the reader yet."""
    _arrivals: Arrivals = attrs.field(factory=Arrivals)

    @property
    def queued(self) -> bool:
        """Whether the request waits for a row, according to the replies that were read."""
        return self._limits.phase == "queue"

    async def wait_accepted(self) -> None:
        """Wait until the request is in the queue. Must be called first, and once. Raises `RequestFailed` (400, 429, 503)."""
        with self.ends_with_failure():
            match await self.receive_reply():
                case Accepted() as accepted:
                    self.accepted = accepted
                case Failed(problem=problem):
                    raise RequestFailed(problem)
                case reply:
                    raise AssertionError(f"{reply!r} before Accepted")

    @contextmanager
    def ends_with_failure(self) -> Iterator[None]:
        """Close the answer if what is done here fails or is cancelled; a problem is recorded."""
        try:
            yield
        except RequestFailed as failed:
            raise self._failed(failed.problem) from None
        except BaseException:
            self.close()
            raise

    async def next(self) -> Delta | Finished:
        """The next Delta, or the end, which is returned again by further calls. Raises `RequestFailed`. Safe to cancel."""
        while self.finished is None:
            reply = await self.receive_reply()
            match reply:
                case Started():
                    self._start(reply)
                case Embedded(vector=vector):
                    self.embedding = vector
                case Scored(logprobs=logprobs):
                    self.prompt_logprobs = logprobs
                case Delta(tokens=tokens):
                    self._read_tokens(len(tokens), reply.at)
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
        """Wait until a reply has arrived besides that the request has started, and leave it to `next`. Safe to cancel."""
        while self.finished is None and self._unreturned is None:
            reply = await self.receive_reply()
            if isinstance(reply, Started):
                self._start(reply)
            else:
                self._unreturned = reply

    def next_nowait(self) -> Delta | None:
        """A Delta that already arrived, else None. It lets a writer combine several Deltas, and is never a terminal event."""
        if self._unreturned is None and self.finished is None:
            try:
                self._unreturned = self._replies.receive_nowait()
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                return None
        if not isinstance(self._unreturned, Delta):
            return None
        delta, self._unreturned = self._unreturned, None
        self._read_tokens(len(delta.tokens), delta.at)
        return delta

    def take_deltas(self, limit: int) -> list[Delta]:
        """The Deltas that already arrived, at most `limit`."""
        deltas: list[Delta] = []
        while len(deltas) < limit and (delta := self.next_nowait()) is not None:
            deltas.append(delta)
        return deltas

    @property
    def has_other(self) -> bool:
        """Whether `next` has something else than a Delta: the last look for Deltas found another reply, or the answer was cancelled."""
        return self._unreturned is not None or self._cancelled

    @property
    def deadline(self) -> float:
        """trio.current_time() when the answer is late, unless it makes progress before."""
        return self._limits.next_deadline().at

    def follow(self, follower: Callable[[], None] | None) -> None:
        """Call `follower` with each reply that arrives, in the sender's task: it neither blocks nor raises. None: nobody. For a
        reader that takes what has arrived without waiting, such as one of many streams."""
        self._arrivals.follower = follower

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
            if self._arrivals.follower is not None:
                self._arrivals.follower()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- progress and end --------------------------------------------------------------------------

    def _start(self, started: Started) -> None:
        self._note_start(started)
        self._limits.enter("prefill")

    def _note_start(self, started: Started) -> None:
        self.cached_tokens, self._disk_tokens = started.cached_tokens, started.disk_tokens
        self.admitted_at = started.at

    def _read_tokens(self, count: int, at: float) -> None:
        self.completion_tokens += count
        self._note_token_time(at)
        self._limits.enter("decode")

    def _note_token_time(self, at: float) -> None:
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
                match self._unreturned or self._replies.receive_nowait():
                    case Started() as started:
                        self._note_start(started)
                    case Delta(tokens=tokens, at=at):
                        self._unread_tokens += len(tokens)
                        self._note_token_time(at)
                    case Accepted() as accepted:
                        self.accepted = accepted
                    case Finished() | Failed() as end:
                        last = end
                self._unreturned = None
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
        )

    def _outcome(self, unread: Finished | Failed | None) -> tuple[Reason, str]:
        end = self.finished or unread
        problem = self.problem or (end.problem if isinstance(end, Failed) else None)
        if problem is not None:
            kind: Reason = "abort" if problem is CANCELLED else "error" if self.accepted.prompt_tokens else "refused"
            return kind, problem.code or problem.type
        return (end.reason, "") if isinstance(end, Finished) else ("abort", "")

    async def receive_reply(self) -> Reply:
        """The next reply. A reply that has already arrived is not late: its reader was slow, and only the limit of the whole request
        applies. Nor is a request late that made progress since the deadline was set."""
        passed = -inf
        try:
            self._receive_waiting()
            while (deadline := self._limits.next_deadline(reply_waits=self._unreturned is not None)).at > passed:
                with trio.move_on_at(deadline.at):
                    if self._unreturned is None:
                        self._unreturned = await self._replies.receive()
                    else:
                        await trio.lowlevel.checkpoint()
                    reply, self._unreturned = self._unreturned, None
                    return reply
                passed = deadline.at
        except trio.EndOfChannel:
            raise AssertionError(f"{self.request_id}: the owner left without a terminal event") from None
        except trio.ClosedResourceError:
            if not self._cancelled:
                raise
            raise RequestFailed(CANCELLED) from None
        raise self._failed(deadline.problem)

    def _receive_waiting(self) -> None:
        if self._unreturned is None:
            with suppress(trio.WouldBlock):
                self._unreturned = self._replies.receive_nowait()
