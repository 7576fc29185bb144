"""Pieces and runs on the disk. A piece is the stored data of one node of the prefix tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

import attrs

from trouper.protocol.work import KnownPiece, Piece

__all__ = ["Damaged", "Piece", "PieceInfo", "Reason", "RunInfo", "known_pieces", "parents_first"]

Reason = Literal["torn", "checksum", "foreign", "vanished"]


class Damaged(Exception):
    """A file is unusable: torn (of the wrong length), of wrong bytes, of other content than expected, or vanished."""

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
    """Size of the payload; 0: the piece has none."""
    snapshot_bytes: int | None
    """Size of the snapshot; None: the piece has none."""


@attrs.frozen
class RunInfo:
    """Contents of a file. `parent`: the key that the first piece continues."""

    name: str
    file_bytes: int
    parent: bytes
    pieces: tuple[PieceInfo, ...]


def parents_first(runs: Iterable[RunInfo]) -> list[RunInfo]:
    """Order runs so that parents come before the runs that continue them; runs whose parent is in none of these come first."""
    waiting: defaultdict[bytes, list[RunInfo]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.name):
        waiting[run.parent].append(run)
    inside = {piece.key for group in waiting.values() for run in group for piece in run.pieces}
    ordered = [run for parent in list(waiting) if parent not in inside for run in waiting.pop(parent)]
    for run in ordered:  # The list grows during the loop.
        for piece in run.pieces:
            ordered += waiting.pop(piece.key, [])
    return ordered


def known_pieces(runs: Iterable[RunInfo]) -> tuple[KnownPiece, ...]:
    """Describe the pieces of runs for the scheduler, in order."""
    return tuple(
        KnownPiece(parent, piece.key, piece.tokens, piece.payload_bytes > 0, piece.snapshot_bytes is not None)
        for run in runs
        for parent, piece in zip([run.parent, *(piece.key for piece in run.pieces)], run.pieces, strict=False)
    )
