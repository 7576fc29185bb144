"""Snapshot boundaries: where the prefill of a row pauses for a snapshot of its rings and recurrent
states, which cannot be cut at any other token."""

from __future__ import annotations

from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.tree_node import Node

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
