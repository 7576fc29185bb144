"""A request in flight, with the channel of its replies. A client aborts by closing that channel."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import attrs
import trio

from trouper.protocol.grammar import FollowedGrammar
from trouper.protocol.media import PromptImage
from trouper.protocol.plans import Breakers, ThinkingLimit
from trouper.protocol.problems import Problem
from trouper.protocol.replies import REPLIES_BEYOND_TOKENS, Accepted, Delta, Failed, Progress, Reply
from trouper.protocol.requests import Generate, PairTokens
from trouper.protocol.settings import Settings
from trouper.protocol.waits import History, RequestState, WaitReason
from trouper.protocol.watch import Watch


@attrs.define(eq=False)
class Arrivals:
    follower: Callable[[], None] | None = None
    """Called with a reply if no task waits, in the sender's task: no blocking, no exception. None
    once the channel is closed."""
    # The channel could wake a task, which would double the cost of a token's way to the client.
    unread: deque[Reply] = attrs.field(factory=deque)
    """Replies that precede those in the channel; all of them, while the client follows."""
    taken: bool = False
    """Whether a Delta was sent since the last `Submission.aborted`."""
    # A client may have left long before, while a plan has the row.
    when_let_go: Callable[[], None] | None = None
    """Called once when the owner lets go of the request."""

    def let_go(self) -> None:
        call, self.when_let_go = self.when_let_go, None
        if call is not None:
            call()


Admit = Callable[[int, int, bool], int]
"""Decides on entry into the queue, from the prompt's tokens, the maximum length of the answer, and
whether the request named that length. Returns the permitted length; raises `RequestFailed`."""


@attrs.frozen(eq=False)
class Submission:
    """A request and the sending end of its replies. The holder is the owner, sends exactly one
    terminal event, then closes the channel."""

    request: Generate
    replies: trio.MemorySendChannel[Reply]
    prompt: tuple[int, ...] = ()
    second_at: int = 0
    """Index of a pair's second text in the prompt (`Admit.second_at`)."""
    images: tuple[PromptImage, ...] = ()
    max_tokens: int = 0
    thinking: ThinkingLimit | None = None
    breakers: Breakers | None = None
    compiled_grammar: FollowedGrammar | None = None
    # Beside the channel: only the latest counts, and a chunk need not wake the client.
    progress: Watch[Progress] = attrs.field(factory=lambda: Watch(Progress()))
    arrivals: Arrivals = attrs.field(factory=Arrivals)
    history: History = attrs.field(factory=History)
    admit: Admit | None = None

    def admitted(self) -> Submission:
        """The prepared request as `admit` permits. Raises `RequestFailed`."""
        if self.admit is None:
            return self
        max_tokens = self.admit(len(self.prompt), self.max_tokens, self.request.names_length)
        return self if max_tokens == self.max_tokens else attrs.evolve(self, max_tokens=max_tokens)

    @property
    def aborted(self) -> bool:
        # Asked for every row after each step's Deltas; no client runs in between, so a channel that
        # took one is open.
        if self.arrivals.taken:
            self.arrivals.taken = False
            return False
        return self.replies.statistics().open_receive_channels == 0

    def reply(self, event: Reply) -> bool:
        """Send a reply. False once the request is aborted. Never blocks: WouldBlock is a bug."""
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
        ignored = () if self.compiled_grammar is None else self.compiled_grammar.ignored
        self.reply(Accepted(self.prompt, max_tokens, ignored))

    def report(self, progress: Progress) -> None:
        self.progress.publish(progress)

    def note(self, state: RequestState, reason: WaitReason = "", detail: str = "") -> None:
        self.history.note(state, reason, detail)

    def end(self, event: Reply) -> None:
        """Send the terminal event, then close. Synchronous, to complete even in cancelled
        cleanup."""
        self.reply(event)
        self.close()

    def close(self) -> None:
        self.replies.close()
        self.arrivals.let_go()

    def fail(self, problem: Problem) -> None:
        self.end(Failed(problem))


def open_submission(
    request: Generate,
    settings: Settings,
    admit: Admit | None = None,
    clock: Callable[[], float] = time.monotonic,
    tokens: PairTokens = ((), 0),
) -> tuple[Submission, trio.MemoryReceiveChannel[Reply]]:
    # The capacity is a contract: at most one Delta a token, and the other replies.
    max_tokens = request.max_tokens or settings.max_kv_size or 2**31
    replies, answer = trio.open_memory_channel[Reply](max_tokens + REPLIES_BEYOND_TOKENS)
    history = History(request.request_id, clock)
    return Submission(request, replies, *tokens, admit=admit, history=history), answer
