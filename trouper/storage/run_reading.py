"""Reading of runs. All data is verified against checksums, lengths and names before it is returned."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
from xxhash import xxh3_128_hexdigest

from trouper.protocol.blocks import Payload
from trouper.storage.file_operations import Disk, read_all
from trouper.storage.run_format import LENGTH_BYTES, Header, Part, Span, header_bytes, parse
from trouper.storage.stored_pieces import Damaged, Piece, PieceInfo, Reason


@attrs.frozen
class PieceRequest:
    """Request for one piece of a run by its index. `key` and `tokens` are those that the reader expects there."""

    index: int
    key: bytes
    tokens: bytes
    payload: bool = True
    snapshot: bool = False


@attrs.frozen(eq=False)
class OpenRun:
    """A run whose header has been read and verified."""

    header: Header
    _disk: Disk
    _fd: int

    def pieces(self, requests: Sequence[PieceRequest]) -> list[Piece]:
        """Read pieces, in the order of `requests`, without the parts that are not requested. Reads only what is necessary."""
        infos = [self._expected(piece) for piece in requests]
        parts: set[tuple[Part, int]] = {("b", piece.index) for piece in requests if piece.payload}
        parts |= {("s", piece.index) for piece in requests if piece.snapshot}
        found = self._read(parts)
        return [
            Piece(info.key, info.tokens, found.get(("b", piece.index), ()), found.get(("s", piece.index)))
            for piece, info in zip(requests, infos, strict=True)
        ]

    def everything(self) -> list[Piece]:
        return self.pieces(
            [
                PieceRequest(index, info.key, info.tokens, snapshot=info.snapshot_bytes is not None)
                for index, info in enumerate(self.header.info.pieces)
            ]
        )

    def _expected(self, piece: PieceRequest) -> PieceInfo:
        infos = self.header.info.pieces
        info = infos[piece.index] if 0 <= piece.index < len(infos) else None
        if info is None or info.key != piece.key or info.tokens != piece.tokens:
            raise self._damaged("foreign", f"another piece at {piece.index}")
        if piece.snapshot and info.snapshot_bytes is None:
            raise self._damaged("foreign", f"no snapshot at {piece.index}")
        return info

    def _read(self, parts: Iterable[tuple[Part, int]]) -> dict[tuple[Part, int], Payload]:
        """Read and verify parts, with one call for all parts that are adjacent in the file."""
        spans = sorted((self.header.span(*part), part) for part in parts)
        found: dict[tuple[Part, int], Payload] = {}
        for (start, end), group in _neighbours(spans):
            data = memoryview(read_all(self._disk, self._fd, end - start, self.header.data_start + start))
            if data.nbytes != end - start:
                raise self._damaged("torn", "ends within the data")
            for span, part in group:
                found[part] = self._checked(part, data[span[0] - start : span[1] - start])
        return found

    def _checked(self, part: tuple[Part, int], data: memoryview) -> Payload:
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
    """Group sorted spans; a span that begins where the previous one ends joins its group."""
    group: list[tuple[Span, tuple[Part, int]]] = []
    for entry in spans:
        if group and group[-1][0][1] != entry[0][0]:
            yield (group[0][0][0], group[-1][0][1]), group
            group = []
        group.append(entry)
    if group:
        yield (group[0][0][0], group[-1][0][1]), group


@contextmanager
def open_run(disk: Disk, path: Path, namespace: str | None = None) -> Iterator[OpenRun]:
    """Open a run and verify its header. Raises `Damaged`, also if the file is of another namespace, and `OSError` if the disk
    fails."""
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
