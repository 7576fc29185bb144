"""What travels between the ranks of one model: rank 0's RankMirror and those of the followers.

Rank 0 decides, followers replay (F19): everything that a rank computes is a function of the ordered stream of plans.
Tensors travel by `mx.distributed`, inside the engines; these messages travel by TCP, so that a rank that died, stalls
or differs is found while the engines are blocked in a collective, which nobody can cancel.
"""

from __future__ import annotations

import attrs

from trouper.protocol.plans import Plan


@attrs.frozen
class Joined:
    """This process's place in the group of ranks. `invitation`: what rank 0 gave everybody through the group itself."""

    rank: int = 0
    size: int = 1
    invitation: bytes = b""

    @property
    def leads(self) -> bool:
        return self.rank == 0


@attrs.frozen
class Digest:
    """What a rank's state must be when it is about to launch a plan; a hash for each field, so that the first that
    differs can be named. `rows`, `lengths` and `blocks` are foretold by the plans, so that a difference is found
    before the collective that it would hang; `order` and `tokens` are rank 0's own after step `settled`."""

    rows: int
    """Ids of the rows, in the order in which they came, and whether each prefills or decodes."""
    lengths: int
    """Tokens in each row's KV, as far as they are settled: of later steps a decoded row counts one token each."""
    blocks: int
    """Ids of the stored blocks and snapshots."""
    settled: int = -1
    """The last step whose answer rank 0 had when it sent the plan; -1: none yet."""
    order: int = 0
    """Which row lies in which slot."""
    tokens: int = 0
    """All tokens sampled so far."""


FIELDS = ("rows", "lengths", "blocks", "order", "tokens")
"""In the order in which they are compared."""


@attrs.frozen
class Planned:
    """Rank 0 to a follower: the next plan, and the state that it expects."""

    plan: Plan
    digest: Digest


@attrs.frozen
class Differs:
    """A follower to rank 0: its state is not what a plan expects. It did not launch the plan. The group ends."""

    rank: int
    step: int
    field: str
    expected: int
    found: int
