"""States of a sequence, and the transitions between them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class State(Enum):
    WAITING = "waiting"
    """In the queue."""
    WAITING_FOR_PREFIX = "waiting for a prefix"
    """In the queue, until a running sequence has prefilled a prefix that both share."""
    WAITING_FOR_DISK = "waiting for the disk"
    """In the queue, until blocks of its prefix are read."""
    PREFILLING = "prefilling"
    """Has a row in the engine, and tokens that no plan prefills yet."""
    DECODING = "decoding"
    """Has a row, which samples at least one token in each step."""
    LAST_TOKEN_SCHEDULED = "last token scheduled"  # noqa: S105 - no password.
    """Has a row, which the next plan drops: its last token is in flight."""
    PREEMPTED = "preempted"
    """Left its row before its end. In the queue, or aborted and not yet dropped by the engine."""
    FINISHED = "finished"
    """Its terminal event was sent, or its client aborted it."""


QUEUED = frozenset({State.WAITING, State.WAITING_FOR_PREFIX, State.WAITING_FOR_DISK})
TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.WAITING: QUEUED | {State.PREFILLING, State.FINISHED},
    State.WAITING_FOR_PREFIX: QUEUED | {State.PREFILLING, State.FINISHED},
    State.WAITING_FOR_DISK: QUEUED | {State.PREFILLING, State.FINISHED},
    State.PREFILLING: frozenset(
        {State.DECODING, State.LAST_TOKEN_SCHEDULED, State.PREEMPTED, State.FINISHED}
    ),
    State.DECODING: frozenset({State.LAST_TOKEN_SCHEDULED, State.PREEMPTED, State.FINISHED}),
    State.LAST_TOKEN_SCHEDULED: frozenset({State.PREEMPTED, State.FINISHED}),
    State.PREEMPTED: QUEUED | {State.PREFILLING, State.FINISHED},
    State.FINISHED: frozenset(),
}


class IllegalTransitionError(Exception):
    """A fault of the scheduler: a sequence was used in a state in which that makes no sense."""
