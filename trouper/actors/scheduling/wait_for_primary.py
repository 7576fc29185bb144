"""Reuse of what live rows hold or still compute: tails to copy, and primaries to wait for.

The *tail* of a live row is the KV between its last stored block and its last computed token; other
rows copy it from the row itself. A *primary* is a row that prefills tokens which a waiting prompt
shares. Waiting for it costs no computation, only time, and the core decides whether that is worth
it.
"""

from __future__ import annotations

from typing import NamedTuple

from trouper.actors.scheduling.block_keys import Chain
from trouper.actors.scheduling.eviction import Eviction
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.tree_node import Node, common
from trouper.protocol.plans import RowId


class LiveMatch(NamedTuple):
    """What live rows add to a prompt's match in the tree."""

    tokens: int
    """Number of tokens that need not be computed: those of the match, or more with the tail of
    `source`."""
    source: Sequence | None = None
    primary: Sequence | None = None
    """Row that computes more tokens of this prompt than `tokens`."""
    until: int = 0
    """Number of tokens, from the beginning, that the primary and the prompt share."""


class LiveRows:
    """The live rows, by the node at which their stored blocks end. A row pins that node."""

    def __init__(self, eviction: Eviction) -> None:
        self._eviction = eviction
        self._rows: dict[Node, dict[RowId, Sequence]] = {}

    def attach(self, row: Sequence, node: Node) -> None:
        """Attach a row to a node, and detach it from the one that it had."""
        self._eviction.pin(node)
        self.detach(row)
        row.node = node
        self._rows.setdefault(node, {})[row.id] = row

    def detach(self, row: Sequence) -> None:
        """Detach a row that has no KV any more, or moves on."""
        if row.node is None:
            return
        rows = self._rows[row.node]
        del rows[row.id]
        if not rows:
            del self._rows[row.node]
        self._eviction.unpin(row.node)
        row.node = None

    def extend(
        self, chain: Chain, limit: int, last: Node, tokens: int, *, tails: bool
    ) -> LiveMatch:
        """Extend a match of `tokens` tokens, whose full blocks end at `last`, by live rows. A tail
        begins where the full blocks end, so only a match of all of these can continue in one, and
        only if `tails`: rings and states cannot be copied at a token."""
        match, until, primary = LiveMatch(tokens), 0, None
        prompt = chain.part(last.end, limit)
        for row in self._rows.get(last, {}).values():
            shared = last.end + common(prompt, row.chain.part(last.end, limit))
            if shared <= tokens:
                continue
            computed, promised = (
                min(shared, row.num_computed_tokens),
                min(shared, row.num_prefill_tokens - 1),
            )
            if tails and tokens >= last.end and computed > match.tokens:
                match = LiveMatch(computed, row)
            if promised > max(until, row.num_computed_tokens):
                until, primary = promised, row
        if primary is None or until <= match.tokens:
            return match
        return match._replace(primary=primary, until=until)
