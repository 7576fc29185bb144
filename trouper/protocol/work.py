"""Orders to SSDWriter, and its news to Scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trouper.protocol.blocks import TOKEN_BYTES, Payload


@attrs.frozen
class Sweep:
    """Order to remove orphaned temporary files and cached files unused for `ttl_s` seconds, to enforce the bounds, to detect
    other changes, and then to measure the directory."""

    ttl_s: float


@attrs.frozen
class Inspect:
    """Order for idle times: verify some of the files and remove damaged ones."""


@attrs.frozen
class Announce:
    """Order to announce the whole catalogue to a scheduler that knows nothing of it."""


@attrs.frozen(eq=False)
class Piece:
    """The block, the snapshot, or both, of one node of the prefix tree."""

    key: bytes
    tokens: bytes
    """Tokens as int32, in the byte order of their writer: here they are only compared and counted."""
    payload: Payload
    """Bytes of the block; () if only the snapshot is present, or if the model keeps nothing for each token."""
    snapshot: Payload | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.payload, *(self.snapshot or ())))


@attrs.frozen(eq=False)
class Write:
    """Order to write consecutive pieces of one chain. `parent` is the key of the node that the first piece continues."""

    parent: bytes
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@attrs.frozen
class NamedPiece:
    """A piece without its bytes, and which of its parts (block, snapshot) are requested."""

    key: bytes
    tokens: bytes
    payload: bool
    snapshot: bool

    @property
    def payload_tokens(self) -> int:
        """Number of tokens whose KV is requested."""
        return len(self.tokens) // TOKEN_BYTES if self.payload else 0


@attrs.frozen
class Run:
    """A future `Write` whose bytes are not available yet."""

    parent: bytes
    pieces: tuple[NamedPiece, ...]

    def filled(self, payloads: Sequence[Payload]) -> Write:
        """Make the `Write` from the requested payloads and snapshots of the pieces, in order."""
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
    """Order to read these pieces into memory, in this order."""

    ticket: int
    wanted: tuple[NamedPiece, ...]


DiskOrder = Sweep | Inspect | Announce | Write | Read


@attrs.frozen
class KnownPiece:
    """Entry of the catalogue: a piece on disk."""

    parent: bytes
    key: bytes
    tokens: bytes
    payload: bool
    snapshot: bool


@attrs.frozen
class Catalogue:
    """News that these pieces are on disk. A piece comes after the one that it continues."""

    pieces: tuple[KnownPiece, ...]
    whole: bool = True
    """Whether the catalogue is complete with this message."""


@attrs.frozen
class Gone:
    """News that the pieces with these keys are no longer on disk."""

    keys: tuple[bytes, ...]


@attrs.frozen
class Written:
    """News that a write was carried out, or `refused`: no room, write budget spent, or a faulty disk."""

    keys: tuple[bytes, ...]
    nbytes: int
    refused: bool = False


@attrs.frozen(eq=False)
class Loaded:
    """Answer to a `Read`: the requested pieces up to the first one that could not be read."""

    ticket: int
    pieces: tuple[Piece, ...]
    nbytes: int
    seconds: float
    held: bool = False
    """Whether other ranks keep their pieces until a plan settles the ticket."""


DiskNews = Catalogue | Gone | Written | Loaded
