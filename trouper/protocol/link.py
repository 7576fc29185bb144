"""Messages between rank 0 and a follower on the control link, besides plans."""

# `actors/ranks/rank_handshake.py` explains the order of `Hello`, `Refused` and `Ready`. Plans
# follow the last `Ready`; `Leave` ends the connection.

from __future__ import annotations

import attrs

from trouper.protocol.blocks import BlockRef
from trouper.protocol.grammar import Grammar
from trouper.protocol.health import DirectoryStats
from trouper.protocol.model import MemoryStats, ModelCard
from trouper.protocol.plans import Plan


@attrs.frozen
class Hello:
    """A follower's rank and flags, after the proof of the secret."""

    rank: int
    size: int
    version: str
    flags: tuple[tuple[str, str], ...]
    """Equal on all ranks, as text."""
    versions: tuple[tuple[str, str], ...] = ()
    """Packages that compute."""


@attrs.frozen
class Refused:
    """Rank 0 refuses a follower. Both processes end."""

    reason: str


@attrs.frozen
class LogRecord:
    level: int
    text: str


@attrs.frozen
class Ready:
    """A follower takes plans."""

    card: ModelCard


@attrs.frozen
class LoadFailed:
    """A follower cannot load the model; a second try would fail, too."""

    reason: str


@attrs.frozen
class Heartbeat:
    """A periodic sign of life in both directions. `step`: the last answered step. `directory`: a
    follower's cache directory, once read."""

    step: int = -1
    memory: MemoryStats | None = None
    directory: DirectoryStats | None = None


@attrs.frozen
class StateMismatch:
    """A follower did not launch a plan because its state differed (`ranks.RankDiffers`)."""

    step: int
    field: str
    expected: int
    found: int


@attrs.frozen
class Crashed:
    reason: str


@attrs.frozen
class Leave:
    """Rank 0 sends no more plans. Without a reason, a follower ends after the last plan. With a
    reason, a follower ends at once, since its engine may wait for the lost rank."""

    reason: str = ""
    unusable: bool = False


@attrs.frozen
class Fetch:
    """Order to read and keep these blocks until a plan settles the ticket."""

    ticket: int
    blocks: tuple[BlockRef, ...]


@attrs.frozen
class Fetched:
    """A follower holds the first `blocks` of the requested blocks. `seconds`: duration of the
    read."""

    ticket: int
    blocks: int
    seconds: float


@attrs.frozen
class Compile:
    """Order to compile the grammar of a coming row."""

    ticket: int
    grammar: Grammar


@attrs.frozen
class Compiled:
    """`fault`: reason of failure. `passes`: the fault is temporary."""

    ticket: int
    fault: str = ""
    passes: bool = False


@attrs.frozen
class WriteDone:
    """The run with these keys was written, or refused."""

    keys: tuple[bytes, ...]
    refused: bool = False


@attrs.frozen
class Missing:
    """A follower no longer has these blocks on disk."""

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
