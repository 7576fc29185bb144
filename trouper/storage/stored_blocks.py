from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import attrs

from trouper.protocol.blocks import BlockRef
from trouper.protocol.work import Run

Reason = Literal["torn", "checksum", "foreign", "vanished"]


class Damaged(Exception):
    """torn: wrong length; checksum: wrong bytes; foreign: other content; vanished."""

    def __init__(self, name: str, reason: Reason, detail: str) -> None:
        super().__init__(f"{name}: {reason}: {detail}")
        self.name, self.reason = name, reason
        self.detail = detail


@attrs.frozen
class BlockEntry:
    key: bytes
    tokens: bytes
    payload_bytes: int
    snapshot_bytes: int | None


@attrs.frozen
class RunInfo:
    """A file's content. `parent`: the key before the first block."""

    name: str
    file_bytes: int
    parent: bytes
    blocks: tuple[BlockEntry, ...]


def parents_first(runs: Iterable[RunInfo]) -> list[RunInfo]:
    waiting: defaultdict[bytes, list[RunInfo]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.name):
        waiting[run.parent].append(run)
    inside = {block.key for group in waiting.values() for run in group for block in run.blocks}
    ordered = [
        run for parent in list(waiting) if parent not in inside for run in waiting.pop(parent)
    ]
    for run in ordered:  # The list grows during the loop.
        for block in run.blocks:
            ordered += waiting.pop(block.key, [])
    return ordered


def catalogue_batches(runs: Iterable[RunInfo], min_blocks: int) -> Iterator[tuple[Run, ...]]:
    batch, size = list[Run](), 0
    for run in runs:
        blocks = tuple(
            BlockRef(
                entry.key, entry.tokens, entry.payload_bytes > 0, entry.snapshot_bytes is not None
            )
            for entry in run.blocks
        )
        batch.append(Run(run.parent, blocks))
        size += len(blocks)
        if size >= min_blocks:
            yield tuple(batch)
            batch, size = [], 0
    if batch:
        yield tuple(batch)


class BlockLocations:
    """The index of the blocks on disk: run and entry of each block by key. A run with the snapshot
    is preferred."""

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
