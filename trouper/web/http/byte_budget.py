"""The byte budget of requests (--request-memory): bodies, waiting prompts, unsent answers. Bytes
are taken before the work and returned at the request's end; nobody waits."""

from __future__ import annotations

from collections import Counter

import attrs

from trouper.protocol.problems import Problem, RequestFailed
from trouper.protocol.settings import ServerSettings
from trouper.system.main_memory import main_memory_bytes

FLAG = "--request-memory"
LITTLE = 2**20  # Bytes of a small request: a conversation of 300,000 characters.

# Default: a fraction of main memory (denominator), at most `MAX_DEFAULT`, with room for `BODIES` of
# the largest bodies.
MAX_DEFAULT, MEMORY_PART, BODIES = 10**9, 16, 8
RETRY_S = 1
STEP = 2**16
"""Bytes taken per growth of an answer."""


def default_bytes(settings: ServerSettings) -> int:
    return max(min(MAX_DEFAULT, main_memory_bytes() // MEMORY_PART), BODIES * settings.body_limit())


class ByteBudget:
    """Bytes free and held, by client. Not thread-safe."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.held = 0
        self._clients: Counter[str] = Counter()

    def open(self, client: str) -> Holding:
        return Holding(self, client)

    def take(self, client: str, amount: int, before: int) -> None:
        """Take bytes for a request that holds `before`. Raises `RequestFailed` (413, 429, 503)."""
        # A client may hold as much as is left free (alone, half of the budget), and for requests
        # that hold little twice as much.
        free = self.total - self.held - amount
        of_client = self._clients[client] + amount
        if of_client > (2 * free if before + amount <= LITTLE else free):
            raise RequestFailed(self._refusal(client, amount, before))
        self.held += amount
        self._clients[client] = of_client

    def give_back(self, client: str, amount: int) -> None:
        self.held -= amount
        self._clients[client] -= amount
        if not self._clients[client]:
            del self._clients[client]

    def _refusal(self, client: str, amount: int, before: int) -> Problem:
        need = f"the request needs {before + amount} bytes of memory"
        if 2 * (before + amount) > self.total:
            message = (
                f"{need}, and one may hold half of the server's {self.total} ({FLAG}): send less "
                f"at a time, or start the server with a larger {FLAG}"
            )
            return Problem(413, message, code="request_memory_too_small")
        mine = self._clients[client] - before
        if amount <= self.total - self.held and mine:
            message = (
                f"{need}, beside the {mine} of your other requests, and so much is not your share "
                f"of the server's {self.total} ({FLAG}): try again when one of them has ended"
            )
            return Problem(
                429,
                message,
                "rate_limit_error",
                None,
                "request_memory_share",
                retry_after_s=RETRY_S,
            )
        message = f"{need}, and requests hold {self.held} of {self.total} ({FLAG}): try again soon"
        return Problem(
            503, message, "server_error", None, "request_memory_full", retry_after_s=RETRY_S
        )


@attrs.define(eq=False)
class Holding:
    _budget: ByteBudget
    _client: str
    bytes: int = 0
    _owed: int = 0

    def grow(self, amount: int) -> None:
        """Hold a few more bytes. Raises `RequestFailed` (413, 429, 503)."""
        self._owed += amount
        if self._owed >= STEP:
            owed, self._owed = self._owed, 0
            self.take(owed)

    def take(self, amount: int) -> None:
        self._budget.take(self._client, amount, self.bytes)
        self.bytes += amount

    def take_up_to(self, total: int) -> None:
        """Hold at least `total`. Raises like `take`."""
        if total > self.bytes:
            self.take(total - self.bytes)

    def give_back(self) -> None:
        """Release all bytes. Idempotent."""
        self._budget.give_back(self._client, self.bytes)
        self.bytes = 0
