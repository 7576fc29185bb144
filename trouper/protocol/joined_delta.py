"""Several deltas as one."""

from __future__ import annotations

from collections.abc import Sequence

from trouper.protocol.replies import Delta


class JoinedDelta(Delta, frozen=True, gc=False):
    """The text, tokens and log-probabilities of several deltas."""

    parts: tuple[Delta, ...] = ()
    """The original deltas, which say the tokens of each text."""


def joined(deltas: Sequence[Delta]) -> Delta:
    """Join deltas for a reader who is behind or wants fewer events (--stream-interval)."""
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
    return delta.parts if isinstance(delta, JoinedDelta) else (delta,)
