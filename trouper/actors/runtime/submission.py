"""A request in flight, with the channel of its replies. A client aborts the request by closing that
channel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import attrs
import trio

from trouper.protocol.plans import Breakers, ThinkingLimit
from trouper.protocol.problems import Problem
from trouper.protocol.replies import REPLIES_BEYOND_TOKENS, Accepted, Delta, Failed, Progress, Reply
from trouper.protocol.requests import Generate
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch


@attrs.define(eq=False)
class Arrivals:
    """Beside a reply channel: what both of its ends know of replies that have arrived."""

    follower: Callable[[], None] | None = None
    """Called when a reply has arrived, if no task waits for it. Called in the sender's task, so it
    neither blocks nor raises. None as soon as the client closes the channel."""
    unread: deque[Reply] = attrs.field(factory=deque)
    """Replies that the client reads before those in the channel. While it follows, all of them: the
    channel, which could wake a task, would cost each token as much as the rest of its way to the
    client."""
    taken: bool = False
    """Whether a Delta was sent since `Submission.aborted` was last asked: then the channel is open,
    and need not be looked at."""
    when_let_go: Callable[[], None] | None = None
    """Called once when the owner lets go of the request. A client may have left long before: until
    then a plan may have its row."""

    def let_go(self) -> None:
        """The owner has no more to do with the request."""
        call, self.when_let_go = self.when_let_go, None
        if call is not None:
            call()


Admit = Callable[[int, int, bool], int]
"""Decides whether a request may enter the queue, given the tokens of its prompt, the most of its
answer, and whether the request named that length. Returns the most tokens that the answer may have;
raises `RequestFailed`."""


@attrs.frozen(eq=False)
class Submission:
    """A request and the sending end of its replies. The actor that holds it is its owner: it sends
    exactly one terminal event, then closes the channel. What RequestIntake prepares is added by
    `attrs.evolve`, and makes it a `PreparedRequest`."""

    request: Generate
    replies: trio.MemorySendChannel[Reply]
    prompt: tuple[int, ...] = ()
    """Prompt tokens."""
    max_tokens: int = 0
    """Maximum number of output tokens: what was requested, as far as the context has room."""
    thinking: ThinkingLimit | None = None
    breakers: Breakers | None = None
    """Sequence breakers of DRY."""
    compiled_grammar: object = None
    """Keeps the compiled grammar available to the engine."""
    progress: Watch[Progress] = attrs.field(factory=lambda: Watch(Progress()))
    """Beside the channel, since only the latest counts and a chunk need not wake the client."""
    arrivals: Arrivals = attrs.field(factory=Arrivals)
    admit: Admit | None = None

    def admitted(self) -> Submission:
        """Return the prepared request as `admit` lets it enter. Raises `RequestFailed`."""
        if self.admit is None:
            return self
        max_tokens = self.admit(len(self.prompt), self.max_tokens, self.request.names_length)
        return self if max_tokens == self.max_tokens else attrs.evolve(self, max_tokens=max_tokens)

    @property
    def aborted(self) -> bool:
        """Whether the client has closed the channel. The scheduler asks for every row after each
        step's results, from which Deltas come; between the two no client runs, so it need not look
        at the channels that took one."""
        if self.arrivals.taken:
            self.arrivals.taken = False
            return False
        return self.replies.statistics().open_receive_channels == 0

    def reply(self, event: Reply) -> bool:
        """Send a reply. False once the request is aborted. Never blocks: the channel has room for a
        whole answer, and WouldBlock is a bug."""
        arrivals = self.arrivals
        if (follower := arrivals.follower) is not None:
            arrivals.unread.append(event)
            follower()
        else:
            try:
                self.replies.send_nowait(event)
            except trio.BrokenResourceError:
                arrivals.taken = False
                return False
        arrivals.taken = type(event) is Delta
        return True

    def accept(self, max_tokens: int) -> None:
        self.reply(Accepted(self.prompt, max_tokens))

    def report(self, progress: Progress) -> None:
        self.progress.publish(progress)

    def end(self, event: Reply) -> None:
        """Send the terminal event, then close. Synchronous, so that it completes even in cancelled
        cleanup."""
        self.reply(event)
        self.close()

    def close(self) -> None:
        """Close the channel after the terminal event, or when the request was aborted, and let go
        of the request."""
        self.replies.close()
        self.arrivals.let_go()

    def fail(self, problem: Problem) -> None:
        self.end(Failed(problem))


def open_submission(
    request: Generate, settings: Settings, admit: Admit | None = None
) -> tuple[Submission, trio.MemoryReceiveChannel[Reply]]:
    """Open a submission. The capacity of its channel is a contract: at most one Delta a token, and
    the other replies."""
    max_tokens = request.max_tokens or settings.max_kv_size or 2**31
    replies, answer = trio.open_memory_channel[Reply](max_tokens + REPLIES_BEYOND_TOKENS)
    return Submission(request, replies, admit=admit), answer
