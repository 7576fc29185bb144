"""The namespace of cached blocks: hex digits that differ wherever KV would."""

from __future__ import annotations

from trouper.protocol.model import ModelCard
from trouper.protocol.requests import CacheScope
from trouper.protocol.settings import Settings
from trouper.storage.cache_fingerprint import namespace

FORMAT = 1
"""Version of the stored format, a part of the namespace."""
NO_SCOPE = CacheScope()
# UTF-8 never has this byte: no salt of a client can spell another scope's root.
SEPARATOR = b"\xff"


def cache_namespace(card: ModelCard, settings: Settings) -> str:
    """The card's fingerprint covers weights, adapter and dtype (F9)."""
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
    """Key of a prefix tree's root, by scope and salt."""
    if scope == NO_SCOPE:
        return salt.encode()
    parts = scope.group, scope.adapter, salt
    return SEPARATOR + SEPARATOR.join(part.encode("utf-8", "surrogatepass") for part in parts)
