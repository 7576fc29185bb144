"""A request on its way, with the one place its replies may go. Closing that place withdraws it."""

from __future__ import annotations

import attrs
import trio

from trouper.protocol.problems import Problem
from trouper.protocol.replies import REPLIES_BEYOND_TOKENS, Accepted, Failed, Reply
from trouper.protocol.requests import Generate
from trouper.protocol.settings import Settings


@attrs.frozen(eq=False)
class Submission:
    """Owned by whoever holds it; the owner sends exactly one terminal event, then closes."""

    request: Generate
    replies: trio.MemorySendChannel[Reply]

    @property
    def withdrawn(self) -> bool:
        return self.replies.statistics().open_receive_channels == 0

    def reply(self, event: Reply) -> bool:
        """False once nobody listens. Never blocks: the channel holds a whole answer, or it is a bug (WouldBlock)."""
        try:
            self.replies.send_nowait(event)
        except trio.BrokenResourceError:
            return False
        return True

    def accept(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        self.reply(Accepted(prompt, max_tokens))

    def end(self, event: Reply) -> None:
        """The terminal event, then the close. Synchronous, so it runs whole even in cancelled cleanup."""
        self.reply(event)
        self.replies.close()

    def close(self) -> None:
        """After the terminal event, or where nobody listens."""
        self.replies.close()

    def fail(self, problem: Problem) -> None:
        self.end(Failed(problem))


def open_submission(request: Generate, settings: Settings) -> tuple[Submission, trio.MemoryReceiveChannel[Reply]]:
    """The capacity is a contract: at most one Delta a token, and what frames them."""
    most = request.max_tokens or settings.max_kv_size or 2**31
    replies, answer = trio.open_memory_channel[Reply](most + REPLIES_BEYOND_TOKENS)
    return Submission(request, replies), answer
