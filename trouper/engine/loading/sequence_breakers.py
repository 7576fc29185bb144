"""Tokens of DRY's sequence breakers, found as in llama.cpp."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from trouper.protocol.plans import Breakers
from trouper.protocol.problems import bad_request

MAX_SEQUENCES = 16384
MAX_SEQUENCE = 20
NO_BYTE = -1  # Last byte of a token without bytes.
Encode = Callable[[str], Sequence[int]]


def breakers_of(breakers: Iterable[str], pieces: Sequence[bytes], encode: Encode) -> Breakers:
    """`pieces`: bytes by token. Raises `RequestFailed` (400) for more than `MAX_SEQUENCES`
    sequences."""
    tokens: set[int] = set()
    sequences: dict[tuple[int, ...], None] = {}
    endings = defaultdict[int, list[int]](list)
    for token, piece in enumerate(pieces):
        endings[piece[-1] if piece else NO_BYTE].append(token)
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
    """The first token ends with a beginning of the breaker. `endings`: tokens by last byte, for
    speed."""
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
