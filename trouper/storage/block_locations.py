"""Index of the blocks on disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trouper.protocol.blocks import BlockRef
from trouper.storage.stored_blocks import BlockEntry, RunInfo


class BlockLocations:
    """Run and entry of each block by key. A run with the snapshot is preferred."""

    def __init__(self, runs: Iterable[RunInfo] = ()) -> None:
        self._locations: dict[bytes, tuple[str, BlockEntry]] = {}
        self.add(*runs)

    def __len__(self) -> int:
        return len(self._locations)

    def add(self, *runs: RunInfo) -> None:
        for run in runs:
            for entry in run.blocks:
                known = self._locations.get(entry.key)
                if (
                    entry.snapshot_bytes is not None
                    or known is None
                    or known[1].snapshot_bytes is None
                ):
                    self._locations[entry.key] = run.name, entry

    def remove(self, runs: Iterable[RunInfo]) -> tuple[bytes, ...]:
        """Forget removed runs. Returns the keys of their blocks."""
        keys = tuple(
            entry.key
            for run in runs
            for entry in run.blocks
            if (location := self._locations.get(entry.key)) is not None and location[0] == run.name
        )
        for key in keys:
            del self._locations[key]
        return keys

    def runs_of(self, keys: Iterable[bytes]) -> set[str]:
        return {self._locations[key][0] for key in keys if key in self._locations}

    def by_run(self, refs: Sequence[BlockRef]) -> list[tuple[str, list[BlockRef]]]:
        """Group blocks by run, in order, up to the first missing block."""
        groups: list[tuple[str, list[BlockRef]]] = []
        for ref in refs:
            name, entry = self._locations.get(ref.key, ("", None))
            if entry is None or (ref.snapshot and entry.snapshot_bytes is None):
                break
            if not groups or groups[-1][0] != name:
                groups.append((name, []))
            groups[-1][1].append(ref)
        return groups
