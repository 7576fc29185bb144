"""A request in flight, with the channel of its replies. A client aborts the request by closing that channel."""

from __future__ import annotations

import attrs
import trio

from trouper.protocol.plans import ThinkingLimit
from trouper.protocol.problems import Problem
from trouper.protocol.replies import REPLIES_BEYOND_TOKENS, Accepted, Failed, Progress, Reply
from trouper.protocol.requests import Generate
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch


@attrs.frozen(eq=False)
class Submission:
    """A request and the sending end of its replies. The actor that holds it is its owner: it sends exactly one terminal event,
    then closes the channel. What RequestIntake prepares is added by `attrs.evolve`, and makes it a `PreparedRequest`."""

    request: Generate
    replies: trio.MemorySendChannel[Reply]
    prompt: tuple[int, ...] = ()
    """Prompt tokens."""
    max_tokens: int = 0
    """Maximum number of output tokens: what was requested, as far as the context has room."""
    thinking: ThinkingLimit | None = None
    compiled_grammar: object = None
    """Keeps the compiled grammar available to the engine."""
    progress: Watch[Progress] = attrs.field(factory=lambda: Watch(Progress()))
    """Beside the channel, since only the latest counts and a chunk need not wake the client."""

    @property
    def aborted(self) -> bool:
        return self.replies.statistics().open_receive_channels == 0

    def reply(self, event: Reply) -> bool:
        """Send a reply. False once the request is aborted. Never blocks: the channel has room for a whole answer, and WouldBlock is a
        bug."""
        try:
            self.replies.send_nowait(event)
        except trio.BrokenResourceError:
            return False
        return True

    def accept(self, max_tokens: int) -> None:
        self.reply(Accepted(self.prompt, max_tokens))

    def report(self, progress: Progress) -> None:
        self.progress.publish(progress)

    def end(self, event: Reply) -> None:
        """Send the terminal event, then close. Synchronous, so that it completes even in cancelled cleanup."""
        self.reply(event)
        self.replies.close()

    def close(self) -> None:
        """Close the channel after the terminal event, or when the request was aborted."""
        self.replies.close()

    def fail(self, problem: Problem) -> None:
        self.end(Failed(problem))


def open_submission(request: Generate, settings: Settings) -> tuple[Submission, trio.MemoryReceiveChannel[Reply]]:
    """Open a submission. The capacity of its channel is a contract: at most one Delta a token, and the other replies."""
    max_tokens = request.max_tokens or settings.max_kv_size or 2**31
    replies, answer = trio.open_memory_channel[Reply](max_tokens + REPLIES_BEYOND_TOKENS)
    return Submission(request, replies), answer
