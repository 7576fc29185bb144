"""Rows with fixed tokens, fed to the engine in any company and any pieces; then the same tokens, in
the same pieces, to mlx-lm's model alone with its own cache. What is compared is the
log-probabilities of every next token.

The pieces are part of the question: kernels round differently for other widths, and some of
mlx-lm's models answer differently in other pieces. Greedy tokens follow: where the two best differ
by more than twice the bound, they are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from trouper.engine.kv.block_store import BlockStore, stored_from
from trouper.engine.kv.quantized_kv import PLAIN, KvFormat
from trouper.engine.kv.rows import Rows, rows_for
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.passes.pass_shapes import EXACT, Shapes
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.plans import BlockId, Restore, RowId, Store

Floats = NDArray[np.float32]
SMALL_BANKS = attrs.evolve(EXACT, first_bank=16, shared_tokens=32)
"""Rows of a few tokens have different banks, and outgrow them."""
SLACK = 6
"""Tokens that rings hold beyond their window, so that drafts can be taken back."""


@attrs.define(eq=False)
class Track:
    """One row: its tokens, the pieces in which they were fed, and the logits after some of them."""

    tokens: Sequence[int]
    pieces: list[int] = attrs.field(factory=list)
    logits: dict[int, mx.array] = attrs.field(factory=dict)
    """By the place of the token after which they come."""
    prompt: int = 0
    """Tokens that are prefilled; the rest is decoded."""

    @property
    def fed(self) -> int:
        return sum(self.pieces)

    def next(self, count: int) -> list[int]:
        return list(self.tokens[self.fed : self.fed + count])


class Play:
    """Feeds tracks to an engine. Rows are named by small numbers."""

    def __init__(
        self,
        model: nn.Module,
        *,
        kv: KvFormat = PLAIN,
        slack: int = SLACK,
        shapes: Shapes = SMALL_BANKS,
        capabilities: Capabilities | None = None,
    ) -> None:
        """`capabilities`: those that a self-check has left; None: guessed."""
        self.model = model
        self.rows: Rows
        self.rows, allowed = rows_for(model, kv, slack, shapes, capabilities)
        self.together = allowed.allows("batch")
        self.prefills_together = allowed.allows("prefill_together")
        self.drafts = allowed.allows("drafts")
        self.banks = allowed.allows("banks")
        self.reason = allowed.batch
        """Why rows step one by one; "" if they do not."""
        self.tracks: dict[RowId, Track] = {}
        self.finished: list[Track] = []
        kept = self.rows if isinstance(self.rows, SlotRows) else None
        self._store = BlockStore(kept.copies) if kept else None
        self._snapshots = bool(kept and kept.copies.layout.snapshot_bytes)
        self._blocks = 0
        self._kept: list[tuple[Restore, Track]] = []

    @property
    def can_restore(self) -> bool:
        return self._store is not None

    def open(self, name: int, tokens: Sequence[int]) -> RowId:
        row = RowId(name)
        self.tracks[row] = Track(tokens)
        self.rows.open(row)
        return row

    def prefill(self, chunks: Mapping[RowId, int]) -> None:
        """All in one call, as one step of the engine does it."""
        done = self.rows.prefill(
            {row: self.tracks[row].next(count) for row, count in chunks.items()}
        )
        for row, count in chunks.items():
            self.tracks[row].pieces.append(count)
        if done is not None:
            mx.eval(done)

    def score(self, row: RowId, count: int) -> None:
        """Prefill with the logits of each token."""
        track = self.tracks[row]
        logits = self.rows.score(row, track.next(count))
        self._keep(track, count, logits)

    def promote(self, *rows: RowId) -> None:
        """Rows whose prompt is complete decode with the next step. One without state runs its first
        token alone."""
        for row in rows:
            track = self.tracks[row]
            if not self.rows.decodes_from_nothing(row):
                self._keep(track, 1, self.rows.first(row, track.next(1)))
            self.rows.promote(row)

    def decode(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.rows.move_outgrown()
            tracks = [self.tracks[row] for row in self.rows.decoding]
            logits = self.rows.decode(mx.array([track.next(1)[0] for track in tracks]))
            for place, track in enumerate(tracks):
                self._keep(track, 1, logits[place : place + 1])

    def verify(self, drafts: Mapping[RowId, tuple[int, int]]) -> None:
        """For each row how many tokens it drafts and how many of them are right; rows that are not
        named draft none."""
        self.rows.move_outgrown()
        plans = [(self.tracks[row], *drafts.get(row, (0, 0))) for row in self.rows.decoding]
        width = 1 + max(drafted for _, drafted, _ in plans)
        fed = np.zeros((len(plans), width), np.int32)
        for place, (track, drafted, right) in enumerate(plans):
            fed[place, : right + 1] = track.next(right + 1)
            fed[place, right + 1 : drafted + 1] = [
                (token + 1) % 500 for token in track.tokens[: drafted - right]
            ]
        logits = self.rows.verify(
            mx.array(fed), np.array([drafted + 1 for _, drafted, _ in plans], np.int32)
        )
        self.rows.accepted(np.array([right for _, _, right in plans], np.int32))
        for place, (track, _, right) in enumerate(plans):
            for token in range(right + 1):
                self._keep(track, 1, logits[place, token : token + 1])

    def store(self, row: RowId, block: int) -> None:
        """Keep all that a row holds in blocks of so many tokens, the last one perhaps shorter, with
        a snapshot. They can be written to disk."""
        assert self._store is not None, "rows of this model are not kept"
        track = self.tracks[row]
        sizes = [min(block, track.fed - start) for start in range(0, track.fed, block)]
        names = [self._name() for _ in sizes]
        snapshot = self._name() if self._snapshots else None
        self._store.store(Store(row, 0, tuple(sizes), tuple(names), snapshot))
        for kept in self._store.persist([*names, *([] if snapshot is None else [snapshot])]):
            assert stored_from(kept.read(), self._store._layout).tokens == kept.tokens
        self._kept.append(
            (
                Restore(track.fed, tuple(names), snapshot=snapshot),
                attrs.evolve(track, pieces=[*track.pieces]),
            )
        )

    def restore(self, name: int, tokens: Sequence[int]) -> RowId:
        """A row that begins with what was stored last, and goes on with `tokens`."""
        assert self._store is not None
        order, source = self._kept[-1]
        row = self.open(name, [*source.tokens[: source.fed], *tokens])
        self._store.restore(row, order)
        self.tracks[row].pieces = [*source.pieces]
        return row

    def drop(self, *rows: RowId) -> None:
        assert self.rows.nbytes >= 0, "reports of the engine add it up"
        self.rows.drop(rows)
        self.finished += [self.tracks.pop(row) for row in rows]

    def error(self) -> float:
        """The largest difference of a log-probability from mlx-lm's own, over all rows that there
        were."""
        return max(
            difference(self.model, track) for track in [*self.finished, *self.tracks.values()]
        )

    def _name(self) -> BlockId:
        self._blocks += 1
        return BlockId(self._blocks)

    def _keep(self, track: Track, count: int, logits: mx.array) -> None:
        """(count, vocabulary) logits after the next `count` tokens."""
        for token in range(count):
            track.logits[track.fed + token] = logits[token]
        mx.eval(logits)
        track.pieces.append(count)


def difference(model: nn.Module, track: Track) -> float:
    """From mlx-lm's own loop over the same pieces; infinite where one has a number and the other
    has none."""
    if not track.logits:
        return 0.0
    own = alone(model, track.tokens, track.pieces)
    ours = mx.stack([track.logits[place] for place in sorted(track.logits)])
    return distance(log_probabilities(ours), log_probabilities(own[mx.array(sorted(track.logits))]))


def alone(model: nn.Module, tokens: Sequence[int], pieces: Sequence[int]) -> mx.array:
    """(fed tokens, vocabulary) logits by the model and its own cache."""
    cache, parts, at = make_prompt_cache(model), [], 0
    for piece in pieces:
        parts.append(model(mx.array([list(tokens[at : at + piece])]), cache=cache)[0])
        mx.eval(parts[-1])
        at += piece
    return mx.concatenate(parts)


def log_probabilities(logits: mx.array) -> Floats:
    logits = logits.astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def distance(one: Floats, other: Floats) -> float:
    """The largest difference. Tokens that both exclude are equal."""
    with np.errstate(invalid="ignore"):
        apart = np.where(one == other, 0.0, np.abs(one - other))
    return float(np.where(np.isnan(apart), np.inf, apart).max())
