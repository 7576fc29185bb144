"""Messages between rank 0 and a follower on the control link, besides plans.

`Hello`, `Refused` and `Ready` are steps of the handshake, whose order
`actors/ranks/rank_handshake.py` explains. After the last `Ready` come plans; `Leave` ends the
connection.
"""

from __future__ import annotations

import attrs

from trouper.protocol.blocks import BlockRef
from trouper.protocol.grammar import Grammar
from trouper.protocol.health import DirectoryStats
from trouper.protocol.model import MemoryStats, ModelCard
from trouper.protocol.plans import Plan


@attrs.frozen
class Hello:
    """A follower introduces itself after the proof of the secret: its rank, and the flags that it
    was started with."""

    rank: int
    size: int
    version: str
    """Version of the wire format: `wire.VERSION`."""
    flags: tuple[tuple[str, str], ...]
    """Flags that must be the same on all ranks, as text."""
    versions: tuple[tuple[str, str], ...] = ()
    """Packages that compute, and their versions."""


@attrs.frozen
class Refused:
    """Rank 0 refuses a follower. Both processes end."""

    reason: str


@attrs.frozen
class LogRecord:
    """A follower's log record, for rank 0's terminal."""

    level: int
    text: str


@attrs.frozen
class Ready:
    """A follower has loaded its shard and takes plans."""

    card: ModelCard


@attrs.frozen
class LoadFailed:
    """A follower cannot load its model, and a second try would fail in the same way."""

    reason: str


@attrs.frozen
class Heartbeat:
    """A sign of life, sent periodically in both directions. `step`: the last step that this rank
    has answered. `directory`: a follower's own cache directory, once it has been read."""

    step: int = -1
    memory: MemoryStats | None = None
    directory: DirectoryStats | None = None


@attrs.frozen
class StateMismatch:
    """A follower's state is not what a plan expects (`ranks.RankDiffers`). The follower did not
    launch the plan."""

    step: int
    field: str
    expected: int
    found: int


@attrs.frozen
class Crashed:
    """A follower's engine raised."""

    reason: str


@attrs.frozen
class Leave:
    """Rank 0 sends no more plans. Without a reason, a follower ends after the last plan. With a
    reason the group is lost, and a follower ends at once, since its engine may wait for the lost
    rank."""

    reason: str = ""
    unusable: bool = False
    """Whether a second try would fail in the same way."""


@attrs.frozen
class Fetch:
    """Rank 0 asks each follower to read its own shards of these blocks, in this order, and to keep
    them in memory until a plan settles the ticket."""

    ticket: int
    blocks: tuple[BlockRef, ...]


@attrs.frozen
class Fetched:
    """A follower holds the first `blocks` of the requested blocks. `seconds`: the duration of the
    read."""

    ticket: int
    blocks: int
    seconds: float


@attrs.frozen
class Compile:
    """Rank 0 asks a follower to compile a grammar, concurrently with the plans; a row with this
    grammar is about to be admitted."""

    ticket: int
    grammar: Grammar


@attrs.frozen
class Compiled:
    """A follower has compiled the grammar, or reports in `fault` why it cannot. `passes`: for the
    moment, and not by the grammar's fault."""

    ticket: int
    fault: str = ""
    passes: bool = False


@attrs.frozen
class WriteDone:
    """A follower has written its shard of the run with these keys, or has refused to."""

    keys: tuple[bytes, ...]
    refused: bool = False


@attrs.frozen
class Missing:
    """A follower no longer has the blocks with these keys on its disk."""

    keys: tuple[bytes, ...]


Message = (
    Hello
    | Refused
    | LogRecord
    | Ready
    | LoadFailed
    | Heartbeat
    | StateMismatch
    | Crashed
    | Leave
    | Fetch
    | Fetched
    | WriteDone
    | Missing
    | Plan
    | Compile
    | Compiled
)
