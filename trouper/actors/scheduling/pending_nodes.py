"""Blocks on disk whose parent is not known yet: of a tenant that has not come yet, or of a text
that was announced from its end."""

from __future__ import annotations

import attrs

from trouper.protocol.blocks import BlockRef


class PendingNodes:
    """Pending blocks by the key of the parent that they wait for. The prefix tree takes them when
    it learns of that parent."""

    def __init__(self) -> None:
        self._by_parent: dict[bytes, dict[bytes, BlockRef]] = {}
        self._parents: dict[bytes, bytes] = {}
        """Keys of the parents, by the blocks' own keys."""

    def add(self, parent_key: bytes, ref: BlockRef) -> None:
        """Add a block, or parts of one that is pending already."""
        siblings = self._by_parent.setdefault(parent_key, {})
        if (before := siblings.get(ref.key)) is not None:
            ref = attrs.evolve(
                ref, payload=ref.payload or before.payload, snapshot=ref.snapshot or before.snapshot
            )
        siblings[ref.key] = ref
        self._parents[ref.key] = parent_key

    def take(self, parent_key: bytes) -> tuple[BlockRef, ...]:
        """Remove and return the blocks that wait for this parent."""
        refs = self._by_parent.pop(parent_key, None)
        if refs is None:
            return ()
        for key in refs:
            del self._parents[key]
        return tuple(refs.values())

    def drop(self, key: bytes) -> None:
        """Forget a block that the disk no longer has."""
        parent_key = self._parents.pop(key, None)
        if parent_key is not None:
            del self._by_parent[parent_key][key]
            if not self._by_parent[parent_key]:
                del self._by_parent[parent_key]
