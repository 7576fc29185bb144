"""Deltas that waited together, as one."""

from __future__ import annotations

from collections.abc import Sequence

from trouper.protocol.replies import Delta


class JoinedDelta(Delta, frozen=True, gc=False):
    """Several deltas of one answer as one. It has all their text, tokens and log-probabilities."""

    parts: tuple[Delta, ...] = ()
    """The deltas as they were generated. Whoever must know which token belongs to which text reads
    them one by one."""


def joined(deltas: Sequence[Delta]) -> Delta:
    """Join deltas into one, because their reader is behind or wants fewer events
    (--stream-interval)."""
    if len(deltas) == 1:
        return deltas[0]
    return JoinedDelta(
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.tokens),
        tuple(seen for delta in deltas for seen in delta.logprobs),
        deltas[-1].at,
        tuple(deltas),
    )


def parts_of(delta: Delta) -> Sequence[Delta]:
    """Return the deltas as they were generated."""
    return delta.parts if isinstance(delta, JoinedDelta) else (delta,)
