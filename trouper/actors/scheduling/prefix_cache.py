"""The prefix cache: which part of a prompt need not be computed, when to wait for another row that computes it, and what a row
stores.

This is the scheduler's side of docs/cache.md. The state is that of the tree it owns, and everything follows from the plans and
their results. The *tail* of a live row is the KV between its last stored block and its last computed token; other rows copy
it from the row itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import attrs

from trouper.actors.scheduling.prefix_tree import Chain, Index, Match, Node, Sizes, common
from trouper.actors.scheduling.sequence import Sequence
from trouper.protocol.health import CacheStats
from trouper.protocol.kv import KvLayout
from trouper.protocol.model import ModelCard
from trouper.protocol.plans import BlockId, Load, Restore, RowId, Store
from trouper.protocol.settings import Settings
from trouper.protocol.work import KnownPiece, NamedPiece, Piece, Run
from trouper.storage.cache_fingerprint import namespace

TAIL_TOKENS = 256
"""Length at which the tail of an answer is stored, so that the end of a row is never expensive and no step copies much."""
UNSAVED = 4096
"""Maximum number of chains that wait for the disk; the oldest are dropped."""
TURNS_KEPT = 2
"""Number of last turns of a prompt whose ends get a snapshot, besides the first turn's end: these are most often shared by
branches."""
APART_TOKENS = 16
"""Minimum distance of two snapshots in tokens. A closer one is not worth its pass over the model, nor the memory that older
turns lose: the end of the last turn and the end of the prompt often have only a template's few tokens between them."""


FORMAT = 1
"""Version of the stored format. It is part of the namespace."""


def cache_namespace(card: ModelCard, settings: Settings) -> str:
    """Hex digits that differ wherever KV would (F9): weights, adapter and dtype are in the card's fingerprint."""
    parts = {
        "format": str(FORMAT),
        "fingerprint": card.fingerprint or card.id,
        "architecture": card.architecture,
        "dtype": card.dtype,
        "kv": card.kv.description,
        "token_bytes": str(card.kv.token_bytes),
        "block_size": str(settings.block_size),
    }
    return namespace(parts)


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


@attrs.frozen(eq=False)
class Saving:
    """Consecutive nodes in flight to the disk. The record is valid even after the nodes were evicted."""

    run: Run
    nodes: tuple[Node, ...]
    nbytes: int


class PrefixCache:
    """The prefix tree, and the nodes at which live rows are."""

    def __init__(self, index: Index, layout: KvLayout, snapshot_tokens: int, stats: CacheStats) -> None:
        self._index = index
        self._enabled = layout.cached and index.sizes.capacity_bytes > 0
        self._by_snapshot = layout.needs_snapshots
        self._every = snapshot_tokens
        self._tails: dict[Node, dict[RowId, Sequence]] = {}
        self._fresh: list[Node] = []
        """Nodes whose block or snapshot is stored by the plan in composition, which therefore must not evict them."""
        self._unsaved: deque[tuple[Node, ...]] = deque()
        """Chains of consecutive nodes that wait to be written to disk."""
        self._underway: dict[bytes, KnownPiece] = {}
        self.saves = False
        """Whether there is a disk tier."""
        self._count = stats

    @classmethod
    def of(cls, card: ModelCard, namespace_hex: str, settings: Settings, stats: CacheStats) -> PrefixCache:
        """Empty cache for a model. The counters continue from `stats`."""
        sizes = Sizes(
            block_size=settings.block_size,
            token_bytes=card.kv.token_bytes,
            snapshot_bytes=card.kv.snapshot_bytes,
            capacity_bytes=card.cache_bytes if settings.cache_memory is None else int(settings.cache_memory),
            capacity_blocks=settings.num_blocks,
        )
        reason = "" if card.kv.cached else card.kv.description
        if not sizes.capacity_bytes:
            reason = "--cache-memory 0"
        index = Index(bytes.fromhex(namespace_hex), sizes)
        return cls(index, card.kv, settings.snapshot_tokens, attrs.evolve(stats, reason=reason))

    # -- before a row ----------------------------------------------------------------------------

    def chain(self, tokens: bytes, salt: str) -> Chain:
        return self._index.chain(tokens, salt)

    def nothing(self, chain: Chain) -> Found:
        """Result of a lookup for a prompt that must be computed whole."""
        return Found(Match((), 0, chain.root), 0, None)

    def look(self, chain: Chain) -> Found:
        """Look a prompt up. The last token is always computed, since its logits are needed (F3)."""
        if not self._enabled:
            return self.nothing(chain)
        limit = len(chain) - 1
        match = self._index.match(chain, limit, at_snapshot=self._by_snapshot)
        here, missing = self._in_memory(match)
        found = self._with_tails(chain, limit, match.last, here)
        if not missing or match.tokens <= found.tokens:
            return found
        return attrs.evolve(found, missing=missing, missing_tokens=match.tokens - found.tokens)

    def _in_memory(self, match: Match) -> tuple[Match, tuple[Node, ...]]:
        """Split a match into the part in memory and the nodes that are missing for the rest (F6)."""
        there = next((n for n, node in enumerate(match.nodes) if node.block is None), len(match.nodes))
        if self._by_snapshot:
            missing = list(match.nodes[there:])
            if match.nodes and match.nodes[-1].snapshot is None and match.nodes[-1] not in missing:
                missing.append(match.nodes[-1])
            while there and (match.nodes[there - 1].snapshot is None):
                there -= 1
        else:
            missing = list(match.nodes[there:])
        nodes = match.nodes[:there]
        tokens = match.tokens if there == len(match.nodes) else (nodes[-1].end if nodes else 0)
        return Match(nodes, tokens, match.last), tuple(missing)

    def _with_tails(self, chain: Chain, limit: int, last: Node, here: Match) -> Found:
        """Extend a match by tails of live rows. A tail begins where the full blocks end, so only a match of all of these can continue
        in one."""
        tokens, source, until, primary = here.tokens, None, 0, None
        rest = chain.part(last.end, limit)
        whole = here.tokens >= last.end and not self._by_snapshot
        for row in self._tails.get(last, {}).values():
            shared = last.end + common(rest, row.chain.part(last.end, limit))
            computed, promised = min(shared, row.num_computed_tokens), min(shared, row.num_prefill_tokens - 1)
            if whole and computed > tokens:
                tokens, source = computed, row
            if promised > max(until, row.num_computed_tokens):
                until, primary = promised, row
        if primary is None or until <= tokens:
            return Found(here, tokens, source)
        return Found(here, tokens, source, primary, until, until - tokens)

    def waits(self) -> None:
        """Count a request that waits for a primary."""
        self._add(waited=1)

    def wait_for(self, found: Found) -> None:
        """Add a boundary to the primary where a waiting prompt departs from it. The primary pauses there, so that both prefill their
        remainders together, before the primary's stream begins and slows the other's prefill. For a model that needs snapshots,
        the snapshot is made there."""
        if found.primary is not None:
            found.primary.add_boundary(found.until)

    # -- a row's life ----------------------------------------------------------------------------

    def enter(self, row: Sequence, found: Found) -> Restore | None:
        """Start a row with the result of its lookup."""
        if not self._enabled:
            return None
        chain, match = row.chain, found.match
        full = [node for node in match.nodes if node.size == self._index.sizes.block_size and node.end <= match.tokens]
        self._settle(row, full[-1] if full else chain.root)
        self._index.touch(match.nodes)
        row.snapshot_at = found.tokens
        whole = (len(chain) - 1) // self._index.sizes.block_size
        self._add(
            hits_block=len(full),
            misses=whole - len(full),
            hits_sequence=int(found.tokens > (full[-1].end if full else 0)),
            queried_tokens=row.num_prefill_tokens,
            hit_tokens=found.tokens,
        )
        if self._by_snapshot:
            self._mark_boundaries(row, found)
        if not found.tokens:
            return None
        nodes = full if found.source is not None else match.nodes
        snapshot = None
        if self._by_snapshot:
            snapshot = match.nodes[-1].snapshot
            self._index.used_snapshot(match.nodes[-1])
        blocks = tuple(node.block for node in nodes if node.block is not None)
        assert len(blocks) == len(nodes), "a block that is not in memory cannot be restored (F6)"
        return Restore(found.tokens, blocks, found.source.id if found.source else None, snapshot)

    def _mark_boundaries(self, row: Sequence, found: Found) -> None:
        """Set the boundaries at which other prompts are likely to continue: before this prompt's end; where it departs from the known
        texts and where its first turn ends (however short the remainder, since more prompts will begin like this); at ends of
        turns; and at regular intervals."""
        end, size, first = row.num_prefill_tokens - 1, self._every, found.tokens + APART_TOKENS
        last = found.match.last
        shared, _ = last.nearest(row.chain.part(last.end, end))
        turns = [turn for turn in row.turns if turn <= end]
        likely = {*turns[-TURNS_KEPT:], *range(size, end, size)}
        wanted = {last.end + shared, *turns[:1], *(place for place in likely if place <= end - APART_TOKENS)}
        row.boundaries = [*sorted(place for place in wanted if first <= place < end), end]

    def computed(self, row: Sequence) -> list[Store]:
        """Stores of a row that continues: its full blocks, and a snapshot at a boundary."""
        if row.node is None:
            return []
        at = row.num_computed_tokens
        cut = at if self._by_snapshot and row.snapshot_due(self._every) and at <= row.num_tokens else None
        stores = self._store(row, min(at, row.num_tokens), cut)
        if not row.prefilling:
            self._save(row.node)
        return stores

    def wants_storing(self, row: Sequence) -> bool:
        """Whether a decoding row has a long tail, or is at a boundary."""
        if row.node is None:
            return False
        return row.num_tokens - row.node.end >= TAIL_TOKENS or (self._by_snapshot and row.snapshot_due(self._every))

    def leave(self, row: Sequence) -> list[Store]:
        """Stores of a row that ends: all of its KV, while the row is still in the engine (F12)."""
        if row.node is None:
            return []
        at = min(row.num_computed_tokens, row.num_tokens)
        stores: list[Store] = []
        if not self._by_snapshot or row.num_computed_tokens <= row.num_tokens:
            stores = self._store(row, at, at)
            self._save(row.node)
        self.gone(row)
        return stores

    def gone(self, row: Sequence) -> None:
        """Detach a row that has no KV any more."""
        if row.node is not None:
            self._unsettle(row)
            row.node = None

    def _store(self, row: Sequence, end: int, cut: int | None) -> list[Store]:
        """Stores of full blocks up to `end`; with `cut` also the part of a block up to there, and its snapshot if one is needed."""
        stores: list[Store] = []
        size = self._index.sizes.block_size
        node = row.node
        assert node is not None
        whole = True
        for start in range(node.end, end - size + 1, size):
            following = self._keep(row, node, start, start + size, stores)
            if following is None:
                whole = False
                break
            node = following
        if node is not row.node:
            self._settle(row, node)
        if cut is not None and whole and cut >= node.end:
            self._cut(row, node, cut, stores)
        return stores

    def _cut(self, row: Sequence, node: Node, cut: int, stores: list[Store]) -> None:
        part = node if cut == node.end else self._keep(row, node, node.end, cut, stores)
        if part is None or part.parent is None:
            return
        if not self._by_snapshot:
            self._save(part)
            return
        snapshot = self._index.add_snapshot(part)
        row.snapshot_at = cut
        if snapshot is None:
            return
        self._pin_until_sent(part)
        self._save(part)
        if stores and stores[-1].start + sum(stores[-1].sizes) == cut:
            stores[-1] = attrs.evolve(stores[-1], snapshot=snapshot)
        else:
            stores.append(Store(row.id, cut, (), (), snapshot))

    def _keep(self, row: Sequence, parent: Node, start: int, end: int, stores: list[Store]) -> Node | None:
        """The node of these tokens. If it is not in memory yet, its store is added to `stores`, merged with the last one where it
        continues that."""
        before = self._index.child(parent, row.chain.part(start, end))
        there = before is not None and before.block is not None
        node = self._index.insert(parent, row.chain.part(start, end))
        if node is None or there:
            return node
        assert node.block is not None
        self._pin_until_sent(node)
        if stores and stores[-1].start + sum(stores[-1].sizes) == start and stores[-1].snapshot is None:
            last = stores[-1]
            stores[-1] = attrs.evolve(last, sizes=(*last.sizes, end - start), blocks=(*last.blocks, node.block))
        else:
            stores.append(Store(row.id, start, (end - start,), (node.block,)))
        return node

    def _settle(self, row: Sequence, node: Node) -> None:
        self._index.pin(node)
        if row.node is not None:
            self._unsettle(row)
        row.node = node
        self._tails.setdefault(node, {})[row.id] = row

    def _unsettle(self, row: Sequence) -> None:
        assert row.node is not None
        tails = self._tails[row.node]
        del tails[row.id]
        if not tails:
            del self._tails[row.node]
        self._index.unpin(row.node)

    # -- the disk --------------------------------------------------------------------------------

    def missing_bytes(self, found: Found) -> int:
        return sum(
            node.size * self._index.sizes.token_bytes + snapshot * self._index.sizes.snapshot_bytes
            for node, snapshot in self.wanted_parts(found)
        )

    def wanted_parts(self, found: Found) -> list[tuple[Node, bool]]:
        """The nodes to read, each with whether its snapshot is needed: only that of the last node is."""
        return [(node, self._by_snapshot and node is found.missing[-1]) for node in found.missing]

    def pin(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._index.pin(node)

    def unpin(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._index.unpin(node)

    def on_disk(self, pieces: Iterable[KnownPiece]) -> None:
        empty = not self._index.sizes.token_bytes
        for piece in pieces:
            self._index.on_disk(
                piece.parent, piece.key, piece.tokens, payload=piece.payload or empty, snapshot=piece.snapshot
            )

    def not_on_disk(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._index.not_on_disk(key)

    def loaded(self, ticket: int, pieces: Iterable[Piece]) -> list[Load]:
        """Assign blocks to pieces that were read, as far as there is room. From now on they are in memory like any other."""
        loads: list[Load] = []
        for place, piece in enumerate(pieces):
            node = self._index.known(piece.key)
            if node is None or node.parent is None or node.tokens != piece.tokens:
                break
            if node.block is None:
                made = self._index.insert(node.parent, node.tokens)
                if made is None or made.block is None:
                    break
                self._pin_until_sent(made)
                loads.append(Load(made.block, piece.payload, ticket, place))
                self._add(hits_disk=1)
            if piece.snapshot is not None and (snapshot := self._index.add_snapshot(node)) is not None:
                self._pin_until_sent(node)
                loads.append(Load(snapshot, piece.snapshot, ticket, place, snapshot=True))
        return loads

    def _save(self, node: Node | None) -> None:
        """Queue a node and its ancestors for the disk."""
        nodes: list[Node] = []
        while self.saves and node is not None and node.parent is not None and not (node.queued or self._is_saved(node)):
            node.queued = True
            nodes.append(node)
            node = node.parent
        if nodes:
            self._unsaved.append(tuple(reversed(nodes)))
        while len(self._unsaved) > UNSAVED:
            for lost in self._unsaved.popleft():
                lost.queued = False

    def _is_saved(self, node: Node) -> bool:
        return (node.on_disk and (node.snapshot is None or node.snapshot_on_disk)) or node.key in self._underway

    def next_run(self, most_bytes: int) -> Saving | None:
        """The next nodes of one chain to write to disk: those in memory that are not on disk yet."""
        while self._unsaved:
            nodes = self._unsaved.popleft()
            for node in nodes:
                node.queued = False
            first = next((n for n, node in enumerate(nodes) if not self._is_saved(node)), len(nodes))
            run: list[Node] = []
            nbytes = 0
            for node in nodes[first:]:
                nbytes += self._saved_bytes(node)
                if node.block is None or self._is_saved(node) or (run and nbytes > most_bytes):
                    break
                run.append(node)
            if run:
                if rest := nodes[first + len(run) :]:
                    for node in rest:
                        node.queued = True
                    self._unsaved.appendleft(rest)
                return self._saving(run)
        return None

    def _saved_bytes(self, node: Node) -> int:
        sizes = self._index.sizes
        return node.size * sizes.token_bytes + (node.snapshot is not None) * sizes.snapshot_bytes

    def _saving(self, run: list[Node]) -> Saving:
        parent = run[0].parent
        assert parent is not None
        for node in run:
            assert node.parent is not None
            self._underway[node.key] = KnownPiece(
                node.parent.key, node.key, node.tokens, payload=True, snapshot=node.snapshot is not None
            )
        pieces = tuple(
            NamedPiece(node.key, node.tokens, payload=True, snapshot=node.snapshot is not None) for node in run
        )
        return Saving(Run(parent.key, pieces), tuple(run), sum(map(self._saved_bytes, run)))

    def saved(self, keys: Iterable[bytes], *, refused: bool) -> None:
        known = [piece for key in keys if (piece := self._underway.pop(key, None)) is not None]
        if not refused:
            self.on_disk(known)

    # -- all of it -------------------------------------------------------------------------------

    def freed(self) -> tuple[BlockId, ...]:
        """Ids that the composed plan evicts."""
        freed = self._index.freed()
        for node in self._fresh:
            self._index.unpin(node)
        self._fresh.clear()
        return freed

    def _pin_until_sent(self, node: Node) -> None:
        self._index.pin(node)
        self._fresh.append(node)

    def shrink(self, excess_bytes: int) -> None:
        """Evict cached blocks under memory pressure, to make room for rows."""
        self._index.shrink(excess_bytes)

    def stats(self) -> CacheStats:
        index = self._index
        return attrs.evolve(
            self._count,
            blocks=index.blocks,
            snapshots=index.snapshots,
            bytes=index.bytes,
            capacity_bytes=index.sizes.capacity_bytes,
            capacity_blocks=index.sizes.max_blocks,
            evicted_blocks=index.counts.evicted_blocks,
            evicted_snapshots=index.counts.evicted_snapshots,
            refused=index.counts.refused,
            collisions=index.counts.collisions,
        )

    def _add(self, **more: int) -> None:
        self._count = attrs.evolve(self._count, **{name: getattr(self._count, name) + n for name, n in more.items()})
