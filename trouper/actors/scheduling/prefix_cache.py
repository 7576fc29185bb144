"""The prefix cache: which part of a prompt need not be computed. This is the scheduler's side of
docs/cache.md; its state is that of the prefix tree, and everything follows from the plans and their
results.

A lookup has a fixed order, from what costs nothing to what costs time. The tree is matched first,
once, against memory and disk together: the match ends at the first node that is in neither, since
nothing behind a hole can be used (F6). The part in memory can be restored by the next plan. Then
live rows are compared, from the last full block on: a tail is copied at once and costs no block, so
it extends the part in memory before anything slower is considered. Only what is still missing then
may be waited for, and the lookup says what each wait would save (`gain` for a primary,
`missing_tokens` for the disk) without beginning either: the core compares both with the time that
computing takes.

A lookup pins nothing, since its result is used at once or not at all. `enter` pins what the plan
restores until that plan is sent, so that whatever else the same plan needs room for cannot evict
it, and the node that the row continues until the row ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from trouper.actors.scheduling.cache_namespace import NO_SCOPE
from trouper.actors.scheduling.eviction import Sizes
from trouper.actors.scheduling.prefix_tree import Match, PrefixTree
from trouper.actors.scheduling.row_storing import LiveRows, RowStoring
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.tree_node import Chain, Node
from trouper.actors.scheduling.write_queue import WriteQueue
from trouper.protocol.blocks import BlockData, BlockRef
from trouper.protocol.health import CacheStats
from trouper.protocol.kv import KvLayout
from trouper.protocol.model import ModelCard
from trouper.protocol.plans import BlockId, Load, Restore, Store
from trouper.protocol.requests import CacheScope
from trouper.protocol.settings import Settings

TURNS_KEPT = 2
"""Number of last turns of a prompt whose ends get a snapshot, besides the first turn's end: these
are most often shared by branches."""
APART_TOKENS = 16
"""Minimum distance of two snapshots in tokens. A closer one is not worth its pass over the model,
nor the memory that older turns lose: the end of the last turn and the end of the prompt often have
only a template's few tokens between them."""


def snapshot_boundaries(row: Sequence, last: Node, cached_tokens: int, interval: int) -> list[int]:
    """Boundaries at which other prompts are likely to continue: before this prompt's end; where it
    departs from the known texts, which end at `last` or in one of its children, and where its first
    turn ends (however short the remainder, since more prompts will begin like this); at ends of
    turns; and every `interval` tokens. None is in the cached tokens or close behind them."""
    end, first = row.num_prefill_tokens - 1, cached_tokens + APART_TOKENS
    shared, _ = last.nearest(row.chain.part(last.end, end))
    turns = [turn for turn in row.turns if turn <= end]
    likely = {*turns[-TURNS_KEPT:], *range(interval, end, interval)}
    boundaries = {last.end + shared, *turns[:1], *(at for at in likely if at <= end - APART_TOKENS)}
    return [*sorted(at for at in boundaries if first <= at < end), end]


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


class PrefixCache:
    """The prefix tree, the live rows that continue it, and the blocks that wait to be written to
    disk."""

    def __init__(
        self, tree: PrefixTree, layout: KvLayout, snapshot_tokens: int, stats: CacheStats
    ) -> None:
        self.tree = tree
        self._eviction = tree.eviction
        self._enabled = layout.cached and tree.sizes.capacity_bytes > 0
        self._snapshot_tokens = snapshot_tokens if layout.needs_snapshots else None
        self._live = LiveRows(tree.eviction)
        self.writes = WriteQueue(tree.sizes)
        self._storing = RowStoring(tree, self._live, self.writes, self._snapshot_tokens)
        self._count = self._published = stats
        self._state: tuple[CacheStats, dict[str, Any]] | None = None
        """What `_published` was made of."""

    @classmethod
    def of(
        cls, card: ModelCard, namespace_hex: str, settings: Settings, stats: CacheStats
    ) -> PrefixCache:
        """Empty cache for a model. The counters continue from `stats`."""
        sizes = Sizes(
            block_size=settings.block_size,
            token_bytes=card.kv.token_bytes,
            snapshot_bytes=card.kv.snapshot_bytes,
            capacity_bytes=card.cache_bytes
            if settings.cache_memory is None
            else int(settings.cache_memory),
            capacity_blocks=settings.num_blocks,
        )
        reason = "" if card.kv.cached else card.kv.description
        if not sizes.capacity_bytes:
            reason = "--cache-memory 0"
        tree = PrefixTree(bytes.fromhex(namespace_hex), sizes)
        return cls(tree, card.kv, settings.snapshot_tokens, attrs.evolve(stats, reason=reason))

    # -- lookup ----------------------------------------------------------------------------------

    def chain(self, tokens: bytes, salt: str, scope: CacheScope = NO_SCOPE) -> Chain:
        return self.tree.chain(tokens, salt, scope)

    def nothing(self, chain: Chain) -> Found:
        """Result of a lookup for a prompt that must be computed from its first token on."""
        return Found(Match((), 0, chain.root), 0, None)

    def look(self, chain: Chain) -> Found:
        """Look a prompt up, in the order that the module's docstring explains. The last token is
        always computed, since its logits are needed (F3)."""
        if not self._enabled:
            return self.nothing(chain)
        limit, tails = len(chain) - 1, self._snapshot_tokens is None
        match = self.tree.match(chain, limit, at_snapshot=not tails)
        resident, missing = self._in_memory(match)
        live = self._live.extend(chain, limit, match.last, resident.tokens, tails=tails)
        found = Found(resident, live.tokens, live.source)
        if live.primary is not None:
            found = attrs.evolve(
                found, primary=live.primary, until=live.until, gain=live.until - live.tokens
            )
        if not missing or match.tokens <= found.tokens:
            return found
        return attrs.evolve(found, missing=missing, missing_tokens=match.tokens - found.tokens)

    def _in_memory(self, match: Match) -> tuple[Match, tuple[Node, ...]]:
        """Split a match into the part in memory and the nodes that are missing for the remainder
        (F6)."""
        resident = next(
            (n for n, node in enumerate(match.nodes) if node.block is None), len(match.nodes)
        )
        missing = list(match.nodes[resident:])
        if self._snapshot_tokens is not None:
            if match.nodes and match.nodes[-1].snapshot is None and match.nodes[-1] not in missing:
                missing.append(match.nodes[-1])
            while resident and match.nodes[resident - 1].snapshot is None:
                resident -= 1
        nodes = match.nodes[:resident]
        tokens = match.tokens if resident == len(match.nodes) else (nodes[-1].end if nodes else 0)
        return Match(nodes, tokens, match.last), tuple(missing)

    def waits(self) -> None:
        """Count a request that waits for a primary."""
        self._add(waited=1)

    def wait_for(self, primary: Sequence, until: int) -> None:
        """Add a boundary to the primary where a waiting prompt departs from it. The primary pauses
        there, so that both prefill their remainders together, before the primary's stream begins
        and slows the other's prefill. For a model that needs snapshots, the snapshot is made
        there."""
        primary.add_boundary(until)

    # -- a row's life ----------------------------------------------------------------------------

    def enter(self, row: Sequence, found: Found) -> Restore | None:
        """Start a row with the result of its lookup."""
        if not self._enabled:
            return None
        chain, match, block_size = row.chain, found.match, self.tree.sizes.block_size
        full = [
            node for node in match.nodes if node.size == block_size and node.end <= match.tokens
        ]
        self._live.attach(row, full[-1] if full else chain.root)
        self._eviction.touch(match.nodes)
        row.snapshot_at = found.tokens
        self._add(
            hits_block=len(full),
            misses=(len(chain) - 1) // block_size - len(full),
            hits_sequence=int(found.tokens > (full[-1].end if full else 0)),
            queried_tokens=row.num_prefill_tokens,
            hit_tokens=found.tokens,
        )
        if self._snapshot_tokens is not None:
            row.boundaries = snapshot_boundaries(
                row, match.last, found.tokens, self._snapshot_tokens
            )
        if match.nodes:
            self._eviction.pin_until_sent(match.nodes[-1])
        return self._restore(found, full) if found.tokens else None

    def _restore(self, found: Found, full: list[Node]) -> Restore:
        nodes = found.match.nodes if found.source is None else full
        snapshot = None
        if self._snapshot_tokens is not None:
            snapshot = found.match.nodes[-1].snapshot
            self._eviction.touch_snapshot(found.match.nodes[-1])
        blocks = tuple(node.block for node in nodes if node.block is not None)
        assert len(blocks) == len(nodes), "a block that is not in memory cannot be restored (F6)"
        return Restore(found.tokens, blocks, found.source.id if found.source else None, snapshot)

    def cut(self, chain: Chain, found: Found, nbytes: int) -> Found:
        """Reduce a result to cached blocks of at most `nbytes` bytes."""
        nodes = found.within(nbytes, self.tree.sizes, at_snapshot=self._snapshot_tokens is not None)
        if len(nodes) == len(found.match.nodes):
            return found
        return (
            Found(Match(nodes, nodes[-1].end, nodes[-1]), nodes[-1].end, None)
            if nodes
            else self.nothing(chain)
        )

    def computed(self, row: Sequence) -> list[Store]:
        """Stores of a row that continues."""
        return self._storing.computed(row)

    def wants_storing(self, row: Sequence) -> bool:
        """Whether a decoding row has something to store."""
        return self._storing.due(row)

    def leave(self, row: Sequence) -> list[Store]:
        """Stores of a row that ends."""
        return self._storing.ended(row)

    def release(self, row: Sequence) -> None:
        """Let go of what a running row has stored, so that it can be evicted. The row stores
        nothing any more."""
        self._live.detach(row)

    # -- the disk --------------------------------------------------------------------------------

    @property
    def saves(self) -> bool:
        """Whether there is a disk tier."""
        return self.writes.enabled

    @saves.setter
    def saves(self, enabled: bool) -> None:
        self.writes.enabled = enabled

    def missing_refs(self, found: Found) -> tuple[BlockRef, ...]:
        """What to read from disk: blocks that are not in memory, and the snapshot of the last node
        if one is needed."""
        last = None if self._snapshot_tokens is None else found.missing[-1]
        return tuple(
            BlockRef(node.key, node.tokens, node.block is None, node is last)
            for node in found.missing
        )

    def missing_bytes(self, found: Found) -> int:
        sizes = self.tree.sizes
        tokens = sum(node.size for node in found.missing)
        return (
            tokens * sizes.token_bytes + (self._snapshot_tokens is not None) * sizes.snapshot_bytes
        )

    def pin(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._eviction.pin(node)

    def unpin(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._eviction.unpin(node)

    def on_disk(self, blocks: Iterable[tuple[bytes, BlockRef]]) -> None:
        """Record blocks on disk, each with the key of its parent."""
        empty = not self.tree.sizes.token_bytes
        for parent_key, ref in blocks:
            self.tree.on_disk(parent_key, attrs.evolve(ref, payload=True) if empty else ref)

    def not_on_disk(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.tree.not_on_disk(key)

    def loaded(self, ticket: int, blocks: Iterable[BlockData]) -> list[Load]:
        """Assign ids to blocks that were read, as far as there is room. From now on they are in
        memory like any other."""
        loads: list[Load] = []
        for index, data in enumerate(blocks):
            node = self.tree.known(data.key)
            if node is None or node.parent is None or node.tokens != data.tokens:
                break
            if node.block is None:
                if node.parent.parent is not None and node.parent.block is None:
                    break  # There was no room for a block of an earlier part.
                node = self.tree.insert(node.parent, node.tokens)
                if node is None or node.block is None:
                    break
                self._eviction.pin_until_sent(node)
                loads.append(Load(node.block, data.payload, ticket, index))
                self._add(hits_disk=1)
            if data.snapshot is not None and (snapshot := self.tree.add_snapshot(node)) is not None:
                self._eviction.pin_until_sent(node)
                loads.append(Load(snapshot, data.snapshot, ticket, index, snapshot=True))
        return loads

    def saved(self, keys: Iterable[bytes], *, refused: bool) -> None:
        """Take the answer to a write."""
        blocks = self.writes.answered(keys)
        if not refused:
            self.on_disk(blocks)

    # -- eviction --------------------------------------------------------------------------------

    def freed(self) -> tuple[BlockId, ...]:
        """Ids that the composed plan evicts."""
        return self._eviction.freed()

    @property
    def evictable_bytes(self) -> int:
        """Number of bytes that `evict` could free now."""
        return self._eviction.evictable_bytes

    @property
    def bytes(self) -> int:
        """Bytes of all cached blocks and snapshots in memory."""
        return self._eviction.bytes

    def bound(self, nbytes: int | None) -> None:
        """Bound the bytes up to which further blocks are stored."""
        self._eviction.bound_bytes = nbytes

    def evict(self, nbytes: int) -> int:
        """Evict cached blocks with the next plan, to make room for rows. Returns the number of
        evicted bytes."""
        return self._eviction.evict(nbytes)

    # -- statistics ------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        tree, eviction = self.tree, self._eviction
        gauges: dict[str, Any] = {
            "blocks": eviction.blocks,
            "snapshots": eviction.snapshots,
            "bytes": eviction.bytes,
            "capacity_bytes": tree.sizes.capacity_bytes,
            "capacity_blocks": tree.sizes.max_blocks,
            "evicted_blocks": eviction.evicted_blocks,
            "evicted_snapshots": eviction.evicted_snapshots,
            "refused": eviction.refused,
            "collisions": tree.collisions,
        }
        # Most steps change nothing of the cache.
        if (state := (self._count, gauges)) != self._state:
            self._state, self._published = state, attrs.evolve(self._count, **gauges)
        return self._published

    def _add(self, **more: int) -> None:
        self._count = attrs.evolve(
            self._count, **{name: getattr(self._count, name) + n for name, n in more.items()}
        )
