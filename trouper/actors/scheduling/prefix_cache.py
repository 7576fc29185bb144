"""The prefix cache: the part of a prompt that need not be computed (docs/cache.md). A lookup pins
nothing."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from typing import Any

import attrs

from trouper.actors.scheduling.cache_namespace import NO_SCOPE
from trouper.actors.scheduling.eviction import Sizes
from trouper.actors.scheduling.image_identity import trusted_end
from trouper.actors.scheduling.prefix_tree import Match, PrefixTree
from trouper.actors.scheduling.row_storing import (
    LiveMatch,
    LiveRows,
    RowStoring,
    WriteQueue,
)
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.tree_node import Chain, Node
from trouper.protocol.blocks import BlockData, BlockRef
from trouper.protocol.health import CacheStats
from trouper.protocol.kv import KvLayout
from trouper.protocol.media import MediaSpan, chunk_end
from trouper.protocol.model import ModelCard
from trouper.protocol.plans import BlockId, Load, Restore, Store
from trouper.protocol.requests import CacheScope
from trouper.protocol.settings import Settings

TURNS_KEPT = 2
"""Last turns that end with a snapshot, besides the first."""
APART_TOKENS = 16
"""Smallest useful distance of two snapshots in tokens."""


def snapshot_boundaries(row: Sequence, last: Node, cached_tokens: int, interval: int) -> list[int]:
    """Where other prompts are likely to continue."""
    # Where this prompt departs from known texts, the ends of the first and the last turns, and
    # every `interval` tokens.
    end, first = row.num_prefill_tokens - 1, cached_tokens + APART_TOKENS
    shared, _ = last.nearest(row.chain.part(last.end, end))
    turns = [turn for turn in row.turns if turn <= end]
    likely = {*turns[-TURNS_KEPT:], *range(interval, end, interval)}
    boundaries = {last.end + shared, *turns[:1], *(at for at in likely if at <= end - APART_TOKENS)}
    boundaries = {chunk_end(row.spans, 0, at) for at in boundaries}
    return [*sorted(at for at in boundaries if first <= at < end), end]


@attrs.frozen(eq=False)
class Found:
    """The reusable prefix now, and after a wait."""

    match: Match
    tokens: int
    source: Sequence | None
    """Live row whose tail has the last of these tokens."""
    primary: Sequence | None = None
    until: int = 0
    gain: int = 0
    missing: tuple[Node, ...] = ()
    """Nodes on disk only, worth `missing_tokens` tokens."""
    missing_tokens: int = 0

    @property
    def unused(self) -> Found:
        """Restore nothing, but keep the place for a snapshot."""
        return Found(Match((), 0, self.match.last), 0, None)

    def within(self, nbytes: int, sizes: Sizes, *, at_snapshot: bool) -> tuple[Node, ...]:
        """The first nodes, at most `nbytes` bytes; with `at_snapshot` up to and with a snapshot."""
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
    def __init__(
        self,
        tree: PrefixTree,
        layout: KvLayout,
        snapshot_tokens: int,
        stats: CacheStats,
        *,
        restores_images: bool = True,
    ) -> None:
        self.tree = tree
        self._eviction = tree.eviction
        self._restores_images = restores_images
        self._enabled = layout.cached and tree.sizes.capacity_bytes > 0
        self._snapshot_tokens = snapshot_tokens if layout.needs_snapshots else None
        self._live = LiveRows(tree.eviction)
        self.writes = WriteQueue(tree.sizes)
        self._storing = RowStoring(tree, self._live, self.writes, self._snapshot_tokens)
        self._count = self._published = stats
        self._state: tuple[CacheStats, dict[str, Any]] | None = None

    @classmethod
    def of(
        cls, card: ModelCard, namespace_hex: str, settings: Settings, stats: CacheStats
    ) -> PrefixCache:
        """Empty cache; counters continue from `stats`."""
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
        return cls(
            tree,
            card.kv,
            settings.snapshot_tokens,
            attrs.evolve(stats, reason=reason),
            restores_images=card.capabilities.allows("images_restore"),
        )

    # -- lookup ----------------------------------------------------------------------------------

    def chain(self, tokens: bytes, salt: str, scope: CacheScope = NO_SCOPE) -> Chain:
        return self.tree.chain(tokens, salt, scope)

    def nothing(self, chain: Chain) -> Found:
        return Found(Match((), 0, chain.root), 0, None)

    def look(self, chain: Chain, spans: Ordered[MediaSpan] = ()) -> Found:
        """Look a prompt with images at `spans` up. The last token is always computed, for the
        logits (F3)."""
        # From free to slow: one match of the tree up to the first node in neither memory nor disk
        # (F6); then tails of live rows; then the benefit of each wait (`gain`, `missing_tokens`),
        # for the core to weigh.
        if not self._enabled:
            return self.nothing(chain)
        match = self._match(chain, spans)
        resident, missing = self._in_memory(match)
        live = self._extend(chain, spans, match.last, resident.tokens)
        found = Found(resident, live.tokens, live.source)
        # The primary pauses there, and no chunk ends inside an atomic span.
        until = chunk_end(spans, 0, live.until)
        if live.primary is not None and until > live.tokens:
            found = attrs.evolve(found, primary=live.primary, until=until, gain=until - live.tokens)
        if not missing or match.tokens <= found.tokens:
            return found
        return attrs.evolve(found, missing=missing, missing_tokens=match.tokens - found.tokens)

    def _match(self, chain: Chain, spans: Ordered[MediaSpan]) -> Match:
        limit, at_snapshot = len(chain) - 1, self._snapshot_tokens is not None
        match = self.tree.match(chain, limit, at_snapshot=at_snapshot)
        while (end := self._trusted_end(spans, match.tokens)) < match.tokens:
            match = self.tree.match(chain, end, at_snapshot=at_snapshot)
        return match

    def _extend(
        self, chain: Chain, spans: Ordered[MediaSpan], last: Node, tokens: int
    ) -> LiveMatch:
        limit, tails = len(chain) - 1, self._snapshot_tokens is None
        live = self._live.extend(chain, limit, last, tokens, tails=tails)
        # `tokens` itself was compared with tokens behind it, which may be on disk only.
        while live.tokens > tokens and (end := self._trusted_end(spans, live.tokens)) < live.tokens:
            live = self._live.extend(chain, max(end, tokens), last, tokens, tails=tails)
        return live

    def _trusted_end(self, spans: Ordered[MediaSpan], tokens: int) -> int:
        if spans and not self._restores_images:
            return min(tokens, spans[0].start)
        return trusted_end(spans, tokens)

    def _in_memory(self, match: Match) -> tuple[Match, tuple[Node, ...]]:
        """Split a match into the part in memory and the missing nodes (F6)."""
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
        self._add(waited=1)

    def wait_for(self, primary: Sequence, until: int) -> None:
        """Let the primary pause where a waiting prompt departs."""
        # Both then prefill their remainders together, before the primary's stream slows the other's
        # prefill.
        primary.add_boundary(until)

    # -- a row's life ----------------------------------------------------------------------------

    def enter(self, row: Sequence, found: Found) -> Restore | None:
        """Pin restored nodes until the plan is sent, and the row's node until the row ends."""
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
        nodes = found.within(nbytes, self.tree.sizes, at_snapshot=self._snapshot_tokens is not None)
        if len(nodes) == len(found.match.nodes):
            return found
        return (
            Found(Match(nodes, nodes[-1].end, nodes[-1]), nodes[-1].end, None)
            if nodes
            else self.nothing(chain)
        )

    def computed(self, row: Sequence) -> list[Store]:
        return self._storing.computed(row)

    def wants_storing(self, row: Sequence) -> bool:
        return self._storing.due(row)

    def leave(self, row: Sequence) -> list[Store]:
        return self._storing.ended(row)

    def release(self, row: Sequence) -> None:
        """Make a running row's blocks evictable, and store no more."""
        self._live.detach(row)

    # -- the disk --------------------------------------------------------------------------------

    @property
    def saves(self) -> bool:
        return self.writes.enabled

    @saves.setter
    def saves(self, enabled: bool) -> None:
        self.writes.enabled = enabled

    def missing_refs(self, found: Found) -> tuple[BlockRef, ...]:
        """Blocks to read from disk, with the last node's snapshot if needed."""
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
        """Each block comes with the parent's key."""
        empty = not self.tree.sizes.token_bytes
        for parent_key, ref in blocks:
            self.tree.on_disk(parent_key, attrs.evolve(ref, payload=True) if empty else ref)

    def not_on_disk(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.tree.not_on_disk(key)

    def loaded(self, ticket: int, blocks: Iterable[BlockData]) -> list[Load]:
        """Assign ids to read blocks, as room allows."""
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
        blocks = self.writes.answered(keys)
        if not refused:
            self.on_disk(blocks)

    # -- eviction --------------------------------------------------------------------------------

    def freed(self) -> tuple[BlockId, ...]:
        return self._eviction.freed()

    @property
    def evictable_bytes(self) -> int:
        return self._eviction.evictable_bytes

    @property
    def bytes(self) -> int:
        return self._eviction.bytes

    def bound(self, nbytes: int | None) -> None:
        self._eviction.bound_bytes = nbytes

    def evict(self, nbytes: int) -> int:
        """Evict with the next plan. Returns the number of bytes."""
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
