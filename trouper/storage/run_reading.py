"""Verified reading of runs."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
from xxhash import xxh3_128_hexdigest

from trouper.protocol.blocks import BlockData, BlockRef, Tensors
from trouper.storage.file_operations import Disk, read_all
from trouper.storage.run_format import LENGTH_BYTES, Header, Part, Span, header_bytes, parse
from trouper.storage.stored_blocks import BlockEntry, Damaged, Reason

# Bytes of one read: enough for full speed, and small enough for malloc to keep the buffer. Larger
# buffers are mapped and faulted in anew, several times slower.
READ_BYTES = 8 * 2**20


@attrs.frozen(eq=False)
class OpenRun:
    """A run with a verified header."""

    header: Header
    _disk: Disk
    _fd: int

    def blocks(self, refs: Sequence[BlockRef]) -> list[BlockData]:
        """Read the requested parts of blocks, in the order of `refs`."""
        entries = {entry.key: (index, entry) for index, entry in enumerate(self.header.info.blocks)}
        indices = [self._index(ref, *entries.get(ref.key, (-1, None))) for ref in refs]
        parts: set[tuple[Part, int]] = {
            ("b", index) for ref, index in zip(refs, indices, strict=True) if ref.payload
        }
        parts |= {("s", index) for ref, index in zip(refs, indices, strict=True) if ref.snapshot}
        found = self._read(parts)
        return [
            BlockData(ref.key, ref.tokens, found.get(("b", index), ()), found.get(("s", index)))
            for ref, index in zip(refs, indices, strict=True)
        ]

    def everything(self) -> list[BlockData]:
        return self.blocks(
            [
                BlockRef(entry.key, entry.tokens, snapshot=entry.snapshot_bytes is not None)
                for entry in self.header.info.blocks
            ]
        )

    def _index(self, ref: BlockRef, index: int, entry: BlockEntry | None) -> int:
        if entry is None or entry.tokens != ref.tokens:
            raise self._damaged("foreign", f"no block {ref.key.hex()[:16]} of these tokens")
        if ref.snapshot and entry.snapshot_bytes is None:
            raise self._damaged("foreign", f"no snapshot at {index}")
        return index

    def _read(self, parts: Iterable[tuple[Part, int]]) -> dict[tuple[Part, int], Tensors]:
        # Read and verify parts, adjacent ones in one call of about `READ_BYTES`.
        spans = sorted((self.header.span(*part), part) for part in parts)
        found: dict[tuple[Part, int], Tensors] = {}
        for (start, end), group in _neighbours(spans):
            data = memoryview(
                read_all(self._disk, self._fd, end - start, self.header.data_start + start)
            )
            if data.nbytes != end - start:
                raise self._damaged("torn", "ends within the data")
            for span, part in group:
                found[part] = self._checked(part, data[span[0] - start : span[1] - start])
        return found

    def _checked(self, part: tuple[Part, int], data: memoryview) -> Tensors:
        kind, index = part
        if xxh3_128_hexdigest(data) != self.header.checksums[kind][index]:
            raise self._damaged("checksum", f"{'snapshot' if kind == 's' else 'payload'} {index}")
        try:
            return self.header.tensors(kind, index, data)
        except ValueError as error:
            raise self._damaged("foreign", str(error)) from error

    def _damaged(self, reason: Reason, detail: str) -> Damaged:
        return Damaged(self.header.info.name, reason, detail)


def _neighbours(
    spans: list[tuple[Span, tuple[Part, int]]],
) -> Iterator[tuple[Span, list[tuple[Span, tuple[Part, int]]]]]:
    # Group adjacent sorted spans up to `READ_BYTES`.
    group: list[tuple[Span, tuple[Part, int]]] = []
    for entry in spans:
        start, end = (group[0][0][0], group[-1][0][1]) if group else (0, 0)
        if group and (end != entry[0][0] or end - start >= READ_BYTES):
            yield (start, end), group
            group = []
        group.append(entry)
    if group:
        yield (group[0][0][0], group[-1][0][1]), group


@contextmanager
def open_run(disk: Disk, path: Path, namespace: str | None = None) -> Iterator[OpenRun]:
    """Open a run and verify the header. Raises `Damaged`, also for another namespace, and
    `OSError`."""
    try:
        fd = disk.open(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            raise Damaged(path.name, "vanished", "no such file") from error
        raise
    try:
        header = _header(disk, fd, path.name)
        if namespace not in (None, header.namespace):
            raise Damaged(path.name, "foreign", "of another namespace")
        yield OpenRun(header, disk, fd)
    finally:
        disk.close(fd)


def _header(disk: Disk, fd: int, name: str) -> Header:
    file_bytes = disk.size(fd)
    length = read_all(disk, fd, LENGTH_BYTES, 0)
    size = header_bytes(name, length, file_bytes)
    header = read_all(disk, fd, size, LENGTH_BYTES)
    if len(header) < size:
        raise Damaged(name, "torn", "ends within its header")
    return parse(name, length, header, file_bytes)
