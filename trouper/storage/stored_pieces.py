"""What the disk keeps: pieces, in runs. A piece is what is known of one node of the index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

import attrs

from trouper.protocol.work import Piece

__all__ = ["Damaged", "Piece", "PieceInfo", "Reason", "RunInfo", "parents_first"]

Reason = Literal["torn", "checksum", "foreign", "vanished"]


class Damaged(Exception):
    """A file is of no use: torn (its length is not what it says), wrong bytes, not what was looked for, or vanished."""

    def __init__(self, name: str, reason: Reason, detail: str) -> None:
        super().__init__(f"{name}: {reason}: {detail}")
        self.name, self.reason = name, reason
        self.detail = detail


@attrs.frozen
class PieceInfo:
    """A piece without its bytes."""

    key: bytes
    tokens: bytes
    payload_bytes: int
    """0: it has none."""
    snapshot_bytes: int | None
    """None: it has none."""


@attrs.frozen
class RunInfo:
    """What a file holds. `parent` is the key that the first piece continues."""

    name: str
    file_bytes: int
    parent: bytes
    pieces: tuple[PieceInfo, ...]


def parents_first(runs: Iterable[RunInfo]) -> list[RunInfo]:
    """What a run continues comes before it; runs whose parent is in none of these come first."""
    waiting: defaultdict[bytes, list[RunInfo]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.name):
        waiting[run.parent].append(run)
    inside = {piece.key for group in waiting.values() for run in group for piece in run.pieces}
    ordered = [run for parent in list(waiting) if parent not in inside for run in waiting.pop(parent)]
    for run in ordered:  # Grows meanwhile.
        for piece in run.pieces:
            ordered += waiting.pop(piece.key, [])
    return ordered
