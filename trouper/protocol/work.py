"""Orders to SSDWriter, and its news to Scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trouper.protocol.blocks import TOKEN_BYTES, Payload


@attrs.frozen
class Sweep:
    """Remove orphaned temporary files, and cached files unused for `ttl_s` seconds; keep the bounds; look what else has
    changed; then measure the directory."""

    ttl_s: float


@attrs.frozen
class Inspect:
    """Nothing else is to do: read some of what lies there and remove what is damaged."""


@attrs.frozen
class Announce:
    """Tell what is there, from the beginning: whoever asks knows nothing."""


@attrs.frozen(eq=False)
class Piece:
    """A block, a snapshot, or both, of one node of the index."""

    key: bytes
    tokens: bytes
    """int32, in the byte order of whoever wrote them: here they are only compared and counted."""
    payload: Payload
    """() if only the snapshot is here, or if the model keeps nothing for each token."""
    snapshot: Payload | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.payload, *(self.snapshot or ())))


@attrs.frozen(eq=False)
class Write:
    """One chain's consecutive pieces; `parent` is the key of what the first one continues."""

    parent: bytes
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@attrs.frozen
class NamedPiece:
    """A piece without its bytes, and which of its parts are meant."""

    key: bytes
    tokens: bytes
    payload: bool
    snapshot: bool

    @property
    def payload_tokens(self) -> int:
        """Whose KV is meant."""
        return len(self.tokens) // TOKEN_BYTES if self.payload else 0


@attrs.frozen
class Run:
    """What a `Write` will be, before its bytes are there."""

    parent: bytes
    pieces: tuple[NamedPiece, ...]

    def filled(self, payloads: Sequence[Payload]) -> Write:
        """With each piece's payload and snapshot, as far as they are meant, in order."""
        rest = iter(payloads)
        return Write(
            self.parent,
            tuple(
                Piece(one.key, one.tokens, next(rest) if one.payload else (), next(rest) if one.snapshot else None)
                for one in self.pieces
            ),
        )


@attrs.frozen
class Read:
    """Bring these into memory, in this order."""

    ticket: int
    wanted: tuple[NamedPiece, ...]


DiskOrder = Sweep | Inspect | Announce | Write | Read


@attrs.frozen
class KnownPiece:
    """What lies on disk."""

    parent: bytes
    key: bytes
    tokens: bytes
    payload: bool
    snapshot: bool


@attrs.frozen
class Catalogue:
    """These are there; what a piece continues comes before it."""

    pieces: tuple[KnownPiece, ...]
    whole: bool = True
    """No more follow."""


@attrs.frozen
class Gone:
    """These are not there any more."""

    keys: tuple[bytes, ...]


@attrs.frozen
class Written:
    """An order to write was carried out, or `refused`: full, budget spent, or the disk is sick."""

    keys: tuple[bytes, ...]
    nbytes: int
    refused: bool = False


@attrs.frozen(eq=False)
class Loaded:
    """What was asked for, up to the first piece that could not be had."""

    ticket: int
    pieces: tuple[Piece, ...]
    nbytes: int
    seconds: float
    held: bool = False
    """Other ranks keep theirs until a plan says that the ticket is settled."""


DiskNews = Catalogue | Gone | Written | Loaded
