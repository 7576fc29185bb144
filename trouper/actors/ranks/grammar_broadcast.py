"""Grammars for all ranks: each compiles its own before a row that follows it is admitted, so that no engine's thread has to."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import attrs
import trio

from trouper.protocol.grammar import Grammar
from trouper.protocol.link import Compile, Compiled
from trouper.protocol.problems import bad_request

PATIENCE = 2.0
"""Multiple of one rank's bound: a follower may be slower, and have other grammars to compile first."""


@attrs.define(eq=False)
class Spread:
    """A grammar that followers are compiling."""

    missing: set[int]
    """Ranks that have not answered."""
    fault: str = ""
    done: trio.Event = attrs.field(factory=trio.Event)


class GrammarSpreader:
    """Rank 0's side. `tell` sends to every follower and returns their ranks."""

    def __init__(self, tell: Callable[[Compile], frozenset[int]], timeout_s: float) -> None:
        self._tell, self._timeout_s = tell, timeout_s
        self._tickets = count()
        self._open: dict[int, Spread] = {}

    async def spread(self, grammar: Grammar) -> None:
        """Returns when all followers have it. Raises `RequestFailed` (400) if one cannot follow it, or takes too long."""
        ticket = next(self._tickets)
        spread = self._open[ticket] = Spread(set(self._tell(Compile(ticket, grammar))))
        try:
            with trio.move_on_after(PATIENCE * self._timeout_s) as patience:
                if spread.missing:
                    await spread.done.wait()
        finally:
            del self._open[ticket]
        if patience.cancelled_caught:
            late = ", ".join(map(str, sorted(spread.missing)))
            spread.fault = (
                f"rank {late} takes more than {PATIENCE * self._timeout_s:g} s to compile it (--grammar-timeout-s)"
            )
        if spread.fault:
            raise bad_request(f"{grammar.param} cannot be followed: {spread.fault}", grammar.param, "invalid_grammar")

    def heard(self, rank: int, message: Compiled) -> None:
        """Take a follower's answer. An answer after the deadline is dropped."""
        spread = self._open.get(message.ticket)
        if spread is not None:
            spread.missing.discard(rank)
            spread.fault = spread.fault or (f"rank {rank}: {message.fault}" if message.fault else "")
            if not spread.missing or spread.fault:
                spread.done.set()
