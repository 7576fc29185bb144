"""The tokens in which sequence breakers of DRY stand, found as llama.cpp finds them: alone in a
token, or spread over several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from trouper.protocol.plans import Breakers
from trouper.protocol.problems import bad_request

MAX_SEQUENCES = 16384
"""Maximum number of sequences of tokens over which the breakers of one request may be spread."""
MAX_SEQUENCE = 20
"""Maximum number of tokens of one of them."""
NOTHING = -1
"""The last byte of a token without bytes."""
Encode = Callable[[str], Sequence[int]]


def breakers_of(breakers: Iterable[str], pieces: Sequence[bytes], encode: Encode) -> Breakers:
    """Find the tokens of `breakers`. `pieces`: the bytes of each token; `encode`: text to tokens,
    without special ones. Raises `RequestFailed` (400) for more than `MAX_SEQUENCES` sequences."""
    tokens: set[int] = set()
    sequences: dict[tuple[int, ...], None] = {}
    endings = defaultdict[int, list[int]](list)
    for token, piece in enumerate(pieces):
        endings[piece[-1] if piece else NOTHING].append(token)
    for breaker in breakers:
        sought = breaker.encode()
        tokens.update(token for token, piece in enumerate(pieces) if sought in piece)
        sequences |= dict.fromkeys(_spread(breaker, pieces, endings, encode))
        if len(sequences) > MAX_SEQUENCES:
            message = (
                f"dry_sequence_breakers are spread over more than {MAX_SEQUENCES} sequences of "
                "tokens: name fewer, or shorter ones"
            )
            raise bad_request(message, "dry_sequence_breakers", "invalid_value")
    return Breakers(np.array(sorted(tokens), "<i4").tobytes(), tuple(sequences))


def _spread(
    breaker: str, pieces: Sequence[bytes], endings: Mapping[int, Sequence[int]], encode: Encode
) -> Iterable[tuple[int, ...]]:
    """Yield the sequences of tokens whose first one ends with a beginning of the breaker, and whose
    others are the rest of it. `endings`: tokens by their last byte, since there are hundreds of
    beginnings and a hundred thousand tokens."""
    for cut in range(1, len(breaker)):
        head, rest = breaker[:cut].encode(), breaker[cut:]
        tail = tuple(encode(rest))
        written = b"".join(pieces[token] for token in tail if token < len(pieces))
        if written != rest.encode() or len(tail) >= MAX_SEQUENCE:
            # SentencePiece writes a space before a text: such a rest is found in other cuts, or in
            # one token.
            continue
        yield from (
            (token, *tail) for token in endings.get(head[-1], ()) if pieces[token].endswith(head)
        )
