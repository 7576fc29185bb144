"""What `PrefixTree` promises, by dictionaries from (salt, tokens up to the end of a node). Slow and
plain: an oracle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

import attrs

from trouper.actors.scheduling.eviction import NODE_COST, Sizes

Tokens = tuple[int, ...]
Path = tuple[str, Tokens]
"""A salt, and all tokens from the root to the end of a node. No tokens: the root."""


@attrs.define
class Flags:
    """What the disk has of a node."""

    payload: bool = False
    snapshot: bool = False

    def add(self, other: Flags) -> None:
        self.payload |= other.payload
        self.snapshot |= other.snapshot


@attrs.define
class NaiveTree:
    """The same, found by looking at everything."""

    sizes: Sizes
    memory: dict[Path, int] = attrs.field(factory=dict)
    snapshots: dict[Path, int] = attrs.field(factory=dict)
    disk: dict[Path, Flags] = attrs.field(factory=dict)
    orphans: dict[Path, Flags] = attrs.field(factory=dict)
    pins: dict[Path, int] = attrs.field(factory=dict)
    salts: set[str] = attrs.field(factory=set)
    freed: list[int] = attrs.field(factory=list)
    _used: dict[tuple[str, Path], int] = attrs.field(factory=dict)
    _ids: Iterator[int] = attrs.field(factory=count)
    _clock: Iterator[int] = attrs.field(factory=lambda: count(1))

    # -- what there is ---------------------------------------------------------------------------

    def parent(self, path: Path) -> Path:
        salt, tokens = path
        return salt, tokens[: (len(tokens) - 1) // self.sizes.block_size * self.sizes.block_size]

    def above(self, path: Path) -> Iterator[Path]:
        """What it continues, without the root."""
        while (path := self.parent(path))[1]:
            yield path

    def usable(self, path: Path) -> bool:
        return path in self.memory or self.disk.get(path, Flags()).payload

    def has_snapshot(self, path: Path) -> bool:
        return path in self.snapshots or self.disk.get(path, Flags()).snapshot

    def nodes(self) -> set[Path]:
        """What is somewhere, in use, or leads to something that is."""
        own = {
            *self.memory,
            *self.pins,
            *(path for path, flags in self.disk.items() if flags.payload),
        }
        return own.union(*map(self.above, own))

    @property
    def bytes(self) -> int:
        return sum(map(self._cost, self.memory)) + len(self.snapshots) * self.sizes.snapshot_bytes

    @property
    def evictable_bytes(self) -> int:
        """All but blocks that are in use or continued by what is, and snapshots of nodes that are
        in use."""
        locked = set(self.pins).union(*map(self.above, self.pins))
        blocks = sum(self._cost(path) for path in self.memory if path not in locked)
        return blocks + sum(
            self.sizes.snapshot_bytes for path in self.snapshots if path not in self.pins
        )

    def _cost(self, path: Path) -> int:
        return NODE_COST + (len(path[1]) - len(self.parent(path)[1])) * self.sizes.token_bytes

    # -- finding ---------------------------------------------------------------------------------

    def reachable(self, salt: str) -> Iterator[Tokens]:
        """Ends of nodes that are usable together with all that they continue: a hole ends a match
        (F6)."""
        for path in self.nodes():
            if path[0] == salt and all(map(self.usable, (path, *self.above(path)))):
                yield path[1]

    def longest(self, salt: str, tokens: Tokens, *, at_snapshot: bool) -> int:
        found = self.reachable(salt)
        if at_snapshot:
            ends = [
                end for end in found if tokens[: len(end)] == end and self.has_snapshot((salt, end))
            ]
            return max(map(len, ends), default=0)
        return max((shared(end, tokens) for end in found), default=0)

    # -- keeping ---------------------------------------------------------------------------------

    def insert(self, path: Path) -> bool:
        if path in self.memory:
            self.touch([path])
            return True
        held = path if path in self.nodes() else self.parent(path)
        if not self._make_room(self._cost(path), blocks=1, held=held):
            return False
        self.memory[path] = next(self._ids)
        self.touch([path])
        self._adopt()
        return True

    def add_snapshot(self, path: Path) -> bool:
        if path in self.snapshots or not self._make_room(self.sizes.snapshot_bytes, held=path):
            return False
        self.snapshots[path] = next(self._ids)
        self._used["snapshot", path] = next(self._clock)
        return True

    def touch(self, paths: Iterable[Path]) -> None:
        stamp = next(self._clock)
        for path in paths:
            self._used["block", path] = stamp

    def used_snapshot(self, path: Path) -> None:
        self._used["snapshot", path] = next(self._clock)

    def pin(self, path: Path) -> None:
        self.pins[path] = self.pins.get(path, 0) + 1

    def unpin(self, path: Path) -> None:
        self.pins[path] -= 1
        if not self.pins[path]:
            del self.pins[path]
        self._forget_nowhere()

    # -- forgetting ------------------------------------------------------------------------------

    def _make_room(self, cost: int, *, held: Path, blocks: int = 0) -> bool:
        if cost > self.sizes.capacity_bytes:
            return False
        self.pin(held)
        fits = self._fits(cost, blocks)
        while not fits and self._evict_oldest():
            fits = self._fits(cost, blocks)
        self.unpin(held)
        return fits

    def _fits(self, cost: int, blocks: int) -> bool:
        most = self.sizes.capacity_blocks
        fits = most is None or len(self.memory) + blocks <= most
        return fits and self.bytes + cost <= self.sizes.capacity_bytes

    def shrink(self, excess: int) -> int:
        before = self.bytes
        while before - self.bytes < excess and self._evict_oldest():
            pass
        return before - self.bytes

    def _evict_oldest(self) -> bool:
        """A block only if nothing below it is in memory or in use; a snapshot only if its own node
        is not in use."""
        kept = {*self.memory, *self.pins}
        inner = set[Path]().union(*map(self.above, kept))
        candidates = [
            ("block", path) for path in self.memory if path not in inner and path not in self.pins
        ]
        candidates += [("snapshot", path) for path in self.snapshots if path not in self.pins]
        if not candidates:
            return False
        what, path = min(candidates, key=self._used.__getitem__)
        if what == "block":
            self.freed.append(self.memory.pop(path))
        if what == "snapshot" or not self.disk.get(path, Flags()).payload:
            self._forget_snapshot(path)
        self._forget_nowhere()
        return True

    def _forget_snapshot(self, path: Path) -> None:
        if path in self.snapshots:
            self.freed.append(self.snapshots.pop(path))

    def _forget_nowhere(self) -> None:
        nodes = self.nodes()
        self.disk = {path: flags for path, flags in self.disk.items() if path in nodes}

    # -- the disk --------------------------------------------------------------------------------

    def on_disk(self, path: Path, flags: Flags) -> None:
        self.orphans.setdefault(path, Flags()).add(flags)
        self._adopt()

    def root(self, salt: str) -> None:
        self.salts.add(salt)
        self._adopt()

    def _adopt(self) -> None:
        known = self.nodes() | {(salt, ()) for salt in self.salts}
        while found := [path for path in self.orphans if self.parent(path) in known]:
            for path in found:
                self.disk.setdefault(path, Flags()).add(self.orphans.pop(path))
            known.update(found)
        self._forget_nowhere()

    def not_on_disk(self, path: Path) -> None:
        self.orphans.pop(path, None)
        self.disk.pop(path, None)
        if path not in self.memory:
            self._forget_snapshot(path)
        self._forget_nowhere()


def shared(a: Tokens, b: Tokens) -> int:
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
