"""Identity tokens: the prefix cache's words for an image.

All images have the same token ids, so that two prompts with different images would match. In the
cache's keys an image's tokens are negative numbers made from its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trouper.actors.scheduling.tree_node import token_bytes
from trouper.protocol.media import MediaSpan, PromptImage

TRUSTED_TOKENS = 9
"""Identity tokens that prove an image's place in a prompt: 279 bits."""
MIN_TOKENS = 5
"""Tokens of the smallest image behind which a prompt is cached: 155 bits."""
WORDS = 8
"""Tokens that one SHA-256 makes."""


def identity_tokens(digest: bytes, count: int) -> npt.NDArray[np.int32]:
    """Return (count,) int32, all negative: 31 bits each of SHA-256(digest, number of the word)."""
    hashes = (
        hashlib.sha256(digest + index.to_bytes(4, "big")).digest()
        for index in range(-(-count // WORDS))
    )
    words = np.frombuffer(b"".join(hashes), ">u4")[:count]
    # The sign keeps them apart from the ids of every vocabulary.
    return -1 - (words & 0x7FFFFFFF).astype(np.int32)


def cached_tokens(prompt: Sequence[int], images: Sequence[PromptImage]) -> bytes:
    """Return the prompt as big-endian int32 for a `Chain`, with identity tokens for images."""
    if not images:
        return token_bytes(prompt)
    tokens = np.fromiter(prompt, ">i4")
    for image in images:
        span = image.span
        tokens[span.start : span.end] = identity_tokens(span.digest, len(span.tokens))
    return tokens.tobytes()


def engine_tokens(chained: bytes | bytearray, images: Sequence[PromptImage]) -> bytes:
    """Return a chain's tokens as little-endian int32, with the ids of the vocabulary."""
    tokens = np.frombuffer(bytes(chained), ">i4").astype("<i4")
    for image in images:
        span = image.span
        tokens[span.start : span.end] = span.tokens
    return tokens.tobytes()


def trusted_end(spans: Sequence[MediaSpan], tokens: int) -> int:
    """Return where a match of `tokens` tokens may end.

    Few identity tokens may be equal by chance. A match that ends in the first eight of an image, or
    in or behind an image of fewer than five, ends at its start.
    """
    for span in spans:
        if span.start >= tokens:
            break
        if len(span.tokens) < MIN_TOKENS:
            return span.start
        if tokens < min(span.end, span.start + TRUSTED_TOKENS):
            return span.start
    return tokens
