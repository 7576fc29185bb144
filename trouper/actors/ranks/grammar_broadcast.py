"""Grammars on all ranks: compiled before a row's admission, so that no engine's thread compiles
while others wait in a collective."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import attrs
import trio

from trouper.protocol.grammar import Grammar
from trouper.protocol.link import Compile, Compiled
from trouper.protocol.problems import Problem, RequestFailed, bad_request

TIMEOUT_FACTOR = 2.0
"""Time limit for followers, as a multiple of --grammar-timeout-s."""


@attrs.define(eq=False)
class PendingGrammar:
    missing: set[int]
    fault: str = ""
    """Reason of a rank's failure; "": none so far."""
    passes: bool = False
    done: trio.Event = attrs.field(factory=trio.Event)


class GrammarSpreader:
    """Rank 0's side. `post_to_all` sends to every follower and returns their ranks."""

    def __init__(self, post_to_all: Callable[[Compile], frozenset[int]], timeout_s: float) -> None:
        self._post_to_all, self._limit_s = post_to_all, TIMEOUT_FACTOR * timeout_s
        self._tickets = count()
        self._pending: dict[int, PendingGrammar] = {}

    async def spread(self, grammar: Grammar) -> None:
        """Return when all followers have compiled the grammar. Raises `RequestFailed`: 400 if one
        cannot, or takes too long; 503 if one cannot for the moment."""
        ticket = next(self._tickets)
        pending = self._pending[ticket] = PendingGrammar(
            set(self._post_to_all(Compile(ticket, grammar)))
        )
        try:
            with trio.move_on_after(self._limit_s) as limit:
                if pending.missing:
                    await pending.done.wait()
        finally:
            del self._pending[ticket]
        if limit.cancelled_caught:
            late = ", ".join(map(str, sorted(pending.missing)))
            pending.fault = (
                f"rank {late} takes more than {self._limit_s:g} s to compile it "
                "(--grammar-timeout-s)"
            )
        if pending.fault and pending.passes:
            message = f"{grammar.param} could not be compiled: {pending.fault}"
            raise RequestFailed(
                Problem(
                    503,
                    message,
                    "server_error",
                    grammar.param,
                    code="system_shortage",
                    retry_after_s=1,
                )
            )
        if pending.fault:
            raise bad_request(
                f"{grammar.param} cannot be followed: {pending.fault}",
                grammar.param,
                "invalid_grammar",
            )

    def take_answer(self, rank: int, message: Compiled) -> None:
        pending = self._pending.get(message.ticket)
        if pending is not None:
            pending.missing.discard(rank)
            pending.passes = message.passes if not pending.fault else pending.passes
            pending.fault = pending.fault or (
                f"rank {rank}: {message.fault}" if message.fault else ""
            )
            if not pending.missing or pending.fault:
                pending.done.set()
