"""The namespace of cached blocks: hex digits that differ wherever KV would."""

from __future__ import annotations

from trouper.protocol.model import ModelCard
from trouper.protocol.requests import CacheScope
from trouper.protocol.settings import Settings
from trouper.storage.cache_fingerprint import namespace

FORMAT = 1
"""Version of the stored format. It is part of the namespace."""
NO_SCOPE = CacheScope()
SEPARATOR = b"\xff"
"""A byte that UTF-8 never has: a client that chooses its salt cannot write another scope's root."""


def cache_namespace(card: ModelCard, settings: Settings) -> str:
    """Namespace of a model's blocks (F9): weights, adapter and dtype are in the card's
    fingerprint."""
    parts = {
        "format": str(FORMAT),
        "fingerprint": card.fingerprint or card.id,
        "architecture": card.architecture,
        "dtype": card.dtype,
        "kv": card.kv.description,
        "shapes": card.kv.shapes,
        "token_bytes": str(card.kv.token_bytes),
        "block_size": str(settings.block_size),
    }
    return namespace(parts)


def root_of(salt: str, scope: CacheScope) -> bytes:
    """What the key of a prefix tree's root is made of, beside the namespace: different for each
    pair of scope and salt."""
    if scope == NO_SCOPE:
        return salt.encode()
    parts = scope.group, scope.adapter, salt
    return SEPARATOR + SEPARATOR.join(part.encode("utf-8", "surrogatepass") for part in parts)
