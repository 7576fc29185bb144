"""What rank 0 and a follower tell each other on the control link, besides plans."""

from __future__ import annotations

import attrs

from trouper.protocol.grammar import Grammar
from trouper.protocol.health import DirectoryStats
from trouper.protocol.model import MemoryStats, ModelCard
from trouper.protocol.plans import Plan
from trouper.protocol.work import NamedPiece


@attrs.frozen
class Hello:
    """A follower, after the secret was proved: who it is, and with which flags it was started."""

    rank: int
    size: int
    version: str
    """Of the wire: `wire.VERSION`."""
    flags: tuple[tuple[str, str], ...]
    """Those that must be the same on all ranks, as text."""


@attrs.frozen
class Refused:
    """Rank 0: this follower cannot be one. Both end."""

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
    """A follower cannot start, and neither can a second try: its model is not usable."""

    reason: str


@attrs.frozen
class Heartbeat:
    """A sign of life, every so often, both ways. `step`: the last that this rank has answered. `directory`: a follower's
    own cache directory, once it has looked."""

    step: int = -1
    memory: MemoryStats | None = None
    directory: DirectoryStats | None = None


@attrs.frozen
class StateMismatch:
    """A follower's state is not what a plan expects (`ranks.RankDiffers`). It did not launch the plan."""

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
    """Rank 0: no plan comes any more. A follower ends after the last one; or at once, if there is a reason: then the group
    is lost, and its own engine may wait for whoever is."""

    reason: str = ""
    unusable: bool = False
    """A second try would be lost in the same way."""


@attrs.frozen
class Fetch:
    """Rank 0: bring your own of these into memory, in this order, and keep them until a plan settles the ticket."""

    ticket: int
    wanted: tuple[NamedPiece, ...]


@attrs.frozen
class Fetched:
    """A follower keeps the first so many `pieces` of what was wanted. `seconds`: what reading them took."""

    ticket: int
    pieces: int
    seconds: float


@attrs.frozen
class Compile:
    """Rank 0: compile this grammar, beside the plans; a row that follows it is about to be admitted."""

    ticket: int
    grammar: Grammar


@attrs.frozen
class Compiled:
    """A follower has compiled the grammar, or says why it cannot."""

    ticket: int
    fault: str = ""


@attrs.frozen
class WriteDone:
    """A follower has written its own part of a run of these keys, or could not."""

    keys: tuple[bytes, ...]
    refused: bool = False


@attrs.frozen
class Missing:
    """A follower does not have these on its disk any more."""

    keys: tuple[bytes, ...]


Message = (
    Hello | Refused | LogRecord | Ready | LoadFailed | Heartbeat | StateMismatch | Crashed | Leave | Fetch | Fetched | WriteDone | Missing | Plan
    | Compile | Compiled
)  # fmt: skip
