"""The result of a lookup in the prefix cache."""

from __future__ import annotations

import attrs

from trouper.actors.scheduling.eviction import Sizes
from trouper.actors.scheduling.prefix_tree import Match
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.tree_node import Node


@attrs.frozen(eq=False)
class Found:
    """Result of a lookup: what a prompt can reuse now, and what it could reuse after waiting."""

    match: Match
    tokens: int
    """Number of tokens that need not be computed."""
    source: Sequence | None
    """Live row that has the last of these tokens in its tail."""
    primary: Sequence | None = None
    """Live row that computes more tokens of this prompt."""
    until: int = 0
    """Number of tokens, from the beginning, that the primary and the prompt share."""
    gain: int = 0
    """Number of tokens that waiting for the primary saves."""
    missing: tuple[Node, ...] = ()
    """Nodes that are only on disk. With them `missing_tokens` more tokens need not be computed."""
    missing_tokens: int = 0

    @property
    def unused(self) -> Found:
        """The result for the same prompt if nothing is restored. Where it departs from others is
        still known: a snapshot belongs there."""
        return Found(Match((), 0, self.match.last), 0, None)

    def within(self, nbytes: int, sizes: Sizes, *, at_snapshot: bool) -> tuple[Node, ...]:
        """The first nodes, as many as take at most `nbytes` bytes of memory; with `at_snapshot`
        they end at a snapshot, which counts."""
        nodes, count = self.match.nodes, 0
        nbytes -= at_snapshot * sizes.snapshot_bytes
        for node in nodes:
            nbytes -= sizes.block_bytes(node.size)
            if nbytes < 0:
                break
            count += 1
        while 0 < count < len(nodes) and at_snapshot and nodes[count - 1].snapshot is None:
            count -= 1
        return nodes[:count]
