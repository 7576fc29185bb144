"""Index of the pieces on disk: which run has a piece, and where in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from trouper.protocol.work import NamedPiece
from trouper.storage.run_reading import PieceRequest
from trouper.storage.stored_pieces import RunInfo


@attrs.frozen
class PieceLocation:
    """Location of a piece: its run, and its number in it."""

    run: str
    number: int
    snapshot: bool
    """Whether the run has the piece's snapshot, too."""


class PieceLocations:
    """Locations of pieces by key. A piece may be in several runs; the one with its snapshot is preferred."""

    def __init__(self, runs: Iterable[RunInfo] = ()) -> None:
        self._locations: dict[bytes, PieceLocation] = {}
        self.add(*runs)

    def __len__(self) -> int:
        return len(self._locations)

    def add(self, *runs: RunInfo) -> None:
        for run in runs:
            for number, piece in enumerate(run.pieces):
                known, snapshot = self._locations.get(piece.key), piece.snapshot_bytes is not None
                if snapshot or known is None or not known.snapshot:
                    self._locations[piece.key] = PieceLocation(run.name, number, snapshot)

    def remove(self, runs: Iterable[RunInfo]) -> tuple[bytes, ...]:
        """Forget removed runs. Returns the keys of the pieces that were located in them."""
        keys = tuple(
            piece.key
            for run in runs
            for piece in run.pieces
            if (location := self._locations.get(piece.key)) is not None and location.run == run.name
        )
        for key in keys:
            del self._locations[key]
        return keys

    def runs_of(self, keys: Iterable[bytes]) -> set[str]:
        """Names of the runs in which these pieces are located."""
        return {self._locations[key].run for key in keys if key in self._locations}

    def requests(self, pieces: Sequence[NamedPiece]) -> list[tuple[str, list[PieceRequest]]]:
        """Requests to read these pieces, grouped by run, in order, up to the first piece that is not on disk."""
        groups: list[tuple[str, list[PieceRequest]]] = []
        for piece in pieces:
            location = self._locations.get(piece.key)
            if location is None or (piece.snapshot and not location.snapshot):
                break
            if not groups or groups[-1][0] != location.run:
                groups.append((location.run, []))
            groups[-1][1].append(PieceRequest(location.number, piece.key, piece.tokens, piece.payload, piece.snapshot))
        return groups
