"""The search for repetitions in the tokens of a row that enters, for DRY: it runs on the engine's
thread, so other rows wait for it.

Most places where the row's last token stood before differ from its end a few tokens earlier, so
these are compared all at once, token by token. Where many still agree, as in a text of one repeated
token, that would take the square of its length, and the Z-algorithm (Gusfield, Algorithms on
Strings, Trees and Sequences, 1997) takes over, which is linear.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trouper.engine.passes.region import Ints

COMPARED = 64
"""Number of tokens by which all positions are compared at once."""


def matches_of(tokens: Ints, longest: int) -> Ints:
    """Count the tokens up to each that equal the last ones, (n,), at most `longest`; 0 for the last
    itself."""
    matches = np.zeros(len(tokens), np.int32)
    ends = np.arange(len(tokens) - 1)
    for back in range(min(longest, len(tokens) - 1)):
        if back == COMPARED:
            return _common_endings(tokens, longest)
        ends = ends[ends >= back]
        ends = ends[tokens[ends - back] == tokens[len(tokens) - 1 - back]]
        if not len(ends):
            break
        matches[ends] = back + 1
    return matches


def _common_endings(tokens: Ints, longest: int) -> Ints:
    """`matches_of` by the Z-algorithm, from the last token to the first."""
    text: list[int] = tokens[::-1].tolist()
    size, begin, end = len(text), 0, 0
    lengths = [0] * size
    for at in range(1, size):
        length = min(end - at, lengths[at - begin]) if at < end else 0
        while at + length < size and text[length] == text[at + length]:
            length += 1
        lengths[at] = length
        if at + length > end:
            begin, end = at, at + length
    return np.minimum(np.array(lengths[::-1], np.int32), longest)


def tokens_after_break(
    tokens: Ints, breaking: NDArray[np.bool_], sequences: Sequence[tuple[int, ...]], longest: int
) -> int:
    """Count the tokens since the last breaker, at most `longest`. breaking (V,): tokens that
    contain a breaker. `sequences`: tokens over which a breaker is spread."""
    recent = tokens[max(len(tokens) - longest, 0) :]
    single = np.flatnonzero(breaking[recent])
    after = len(recent) - 1 - int(single[-1]) if len(single) else len(recent)
    if not sequences:
        return after
    known, lengths = set(sequences), {len(sequence) for sequence in sequences}
    lasts = np.array(sorted({sequence[-1] for sequence in sequences}))
    for back in np.flatnonzero(np.isin(recent[::-1][:after], lasts)).tolist():
        end = len(tokens) - back
        if any(
            tuple(tokens[end - length : end].tolist()) in known
            for length in lengths
            if length <= end
        ):
            return int(back)
    return after
