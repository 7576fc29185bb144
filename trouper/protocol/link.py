"""What rank 0 and a follower tell each other on the control link, besides plans."""

from __future__ import annotations

import attrs

from trouper.protocol.model import MemoryFacts, ModelCard
from trouper.protocol.plans import Plan


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
class Said:
    """A follower's log record, for rank 0's terminal."""

    level: int
    text: str


@attrs.frozen
class Ready:
    """A follower has loaded its shard and takes plans."""

    card: ModelCard


@attrs.frozen
class Unable:
    """A follower cannot start, and neither can a second try: its model is not usable."""

    reason: str


@attrs.frozen
class Beat:
    """A sign of life, every so often, both ways. `step`: the last that this rank has answered."""

    step: int = -1
    memory: MemoryFacts | None = None


@attrs.frozen
class Differs:
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


Message = Hello | Refused | Said | Ready | Unable | Beat | Differs | Crashed | Leave | Plan
