"""File format of a run: consecutive blocks of one chain, as a safetensors file.

    8 bytes   length of the header, little-endian
    header    JSON, padded with spaces to 8 bytes: `__metadata__`, then types, shapes, offsets
    data      b0.0 b0.1 ... b1.0 ...: payloads by block; then s0.0 ...: snapshots

Neighbouring blocks are one read.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from math import prod
from typing import Final, Literal

import attrs
import msgspec
from xxhash import xxh3_128, xxh3_128_hexdigest, xxh32_hexdigest

from trouper.protocol.blocks import BlockData, Tensor, Tensors
from trouper.storage.file_operations import Buffer
from trouper.storage.stored_blocks import BlockEntry, Damaged, RunInfo

# The metadata begins with a checksum of all else before the data, and has one of each payload and
# snapshot: xxh3_128, against accidents, not attackers.

FORMAT: Final = "trouper-run-1"
SUFFIX: Final = ".safetensors"
LENGTH_BYTES: Final = 8
# As in the safetensors library.
MAX_HEADER_BYTES: Final = 100_000_000
OPENING: Final = b'{"__metadata__":{"checksum":"'
CHECKSUM_END: Final = len(OPENING) + 32
# Checksum of a missing snapshot.
NONE: Final = "-"
ITEM_BYTES: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}

Part = Literal["b", "s"]
""""b": payload, "s": snapshot."""
Span = tuple[int, int]
"""Start and end in the data."""


@attrs.frozen(eq=False)
class Sealed:
    """A run to write. Buffers are not copied."""

    info: RunInfo
    buffers: tuple[Buffer, ...]


class Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: Span


class RunMetadata(msgspec.Struct, frozen=True):
    """Lists are joined by commas: safetensors allows strings only."""

    checksum: str
    format: str
    namespace: str
    parent: str
    keys: str
    tokens: str
    payloads: str
    snapshots: str


@attrs.frozen(eq=False)
class Header:
    info: RunInfo
    namespace: str
    data_start: int
    entries: dict[str, Entry]
    checksums: dict[Part, list[str]]

    def span(self, part: Part, index: int) -> Span:
        """Span of the part's tensors; (0, 0) for an empty part."""
        entries = list(self._entries_of(part, index))
        return (entries[0].data_offsets[0], entries[-1].data_offsets[1]) if entries else (0, 0)

    def tensors(self, part: Part, index: int, data: memoryview) -> Tensors:
        """Split a span's data into tensors. Raises `ValueError` if the sizes differ."""
        tensors, at = [], 0
        for entry in self._entries_of(part, index):
            end = at + tensor_bytes(entry.dtype, entry.shape)
            tensors.append(Tensor(entry.dtype, entry.shape, data[at:end]))
            at = end
        if at != data.nbytes:
            raise ValueError("tensors and their places differ")
        return tuple(tensors)

    def _entries_of(self, part: Part, index: int) -> Iterator[Entry]:
        tensor = 0
        while (entry := self.entries.get(f"{part}{index}.{tensor}")) is not None:
            yield entry
            tensor += 1


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Raises `ValueError` for an unknown dtype."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}")
    return ITEM_BYTES[dtype] * prod(shape)


def file_name(blocks: Sequence[BlockData | BlockEntry]) -> str:
    """First and last key, number of blocks, and a hash of which have payloads and snapshots."""
    first, last = blocks[0].key.hex()[:16], blocks[-1].key.hex()[:16]
    return f"{first}-{last}-{len(blocks)}-{xxh32_hexdigest(bytes(map(_kind, blocks)))}{SUFFIX}"


def _kind(block: BlockData | BlockEntry) -> int:
    if isinstance(block, BlockData):
        return bool(_payload_bytes(block.payload)) + 2 * (block.snapshot is not None)
    return bool(block.payload_bytes) + 2 * (block.snapshot_bytes is not None)


def _payload_bytes(payload: Tensors) -> int:
    return sum(tensor.nbytes for tensor in payload)


def seal(namespace: str, parent: bytes, blocks: Sequence[BlockData]) -> Sealed:
    """Encode a run of consecutive blocks. Raises `ValueError` for tensors whose bytes do not fill
    the shape."""
    entries: dict[str, Entry] = {}
    buffers: list[Buffer] = []
    end = 0
    for name, tensor in _tensors(blocks):
        start, end = end, end + tensor.nbytes
        if tensor.nbytes != tensor_bytes(tensor.dtype, tensor.shape):
            raise ValueError(f"{name}: {tensor.nbytes} bytes are not {tensor.dtype} {tensor.shape}")
        entries[name] = Entry(tensor.dtype, tensor.shape, (start, end))
        buffers.append(tensor.data)
    front = _front(_metadata(namespace, parent, blocks), entries)
    block_entries = tuple(_block_entry(block) for block in blocks)
    return Sealed(
        RunInfo(file_name(blocks), len(front) + end, parent, block_entries), (front, *buffers)
    )


def _tensors(blocks: Sequence[BlockData]) -> Iterator[tuple[str, Tensor]]:
    for part in ("b", "s"):
        for index, block in enumerate(blocks):
            for number, tensor in enumerate(block.payload if part == "b" else block.snapshot or ()):
                yield f"{part}{index}.{number}", tensor


def _block_entry(block: BlockData) -> BlockEntry:
    snapshot_bytes = None if block.snapshot is None else _payload_bytes(block.snapshot)
    return BlockEntry(block.key, block.tokens, _payload_bytes(block.payload), snapshot_bytes)


def _metadata(namespace: str, parent: bytes, blocks: Sequence[BlockData]) -> RunMetadata:
    return RunMetadata(
        checksum="0" * 32,
        format=FORMAT,
        namespace=namespace,
        parent=parent.hex(),
        keys=",".join(block.key.hex() for block in blocks),
        tokens=",".join(b64encode(block.tokens).decode() for block in blocks),
        payloads=",".join(_checksum(block.payload) for block in blocks),
        snapshots=",".join(
            NONE if block.snapshot is None else _checksum(block.snapshot) for block in blocks
        ),
    )


def _checksum(payload: Tensors) -> str:
    digest = xxh3_128()
    for tensor in payload:
        digest.update(tensor.data)
    return digest.hexdigest()


def _front(metadata: RunMetadata, entries: dict[str, Entry]) -> bytes:
    header = msgspec.json.encode({"__metadata__": metadata, **entries})
    header += b" " * (-len(header) % 8)
    length = len(header).to_bytes(LENGTH_BYTES, "little")
    remainder = header[CHECKSUM_END:]
    return b"".join((length, OPENING, xxh3_128_hexdigest(length + remainder).encode(), remainder))


def header_bytes(name: str, length: bytes, file_bytes: int) -> int:
    """Decode the header's length. Raises `Damaged`."""
    size = int.from_bytes(length, "little")
    if len(length) < LENGTH_BYTES or size > min(file_bytes - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise Damaged(name, "torn", "shorter than its header")
    return size


def parse(name: str, length: bytes, header: bytes, file_bytes: int) -> Header:
    """Verify and decode a header. Raises only `Damaged`, for any bytes."""
    if not header.startswith(OPENING):
        raise Damaged(name, "foreign", "not a run")
    if (
        xxh3_128_hexdigest(length + header[CHECKSUM_END:]).encode()
        != header[len(OPENING) : CHECKSUM_END]
    ):
        raise Damaged(name, "checksum", "header")
    try:
        found = _decode(name, header, file_bytes)
    except (ValueError, LookupError, msgspec.MsgspecError) as error:
        raise Damaged(name, "foreign", f"header: {error}") from error
    if found.info.name != name:
        raise Damaged(name, "foreign", f"the name of {found.info.name}")
    return found


def _decode(name: str, header: bytes, file_bytes: int) -> Header:
    raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(raw.pop("__metadata__"), type=RunMetadata)
    if metadata.format != FORMAT:
        raise Damaged(name, "foreign", f"format {metadata.format}")
    entries = {tensor: msgspec.json.decode(entry, type=Entry) for tensor, entry in raw.items()}
    data_start = LENGTH_BYTES + len(header)
    if (
        data_start + max((entry.data_offsets[1] for entry in entries.values()), default=0)
        != file_bytes
    ):
        raise Damaged(name, "torn", f"{file_bytes} bytes, not what its header says")
    checksums: dict[Part, list[str]] = {
        "b": metadata.payloads.split(","),
        "s": metadata.snapshots.split(","),
    }
    blocks = _block_entries(metadata, entries, checksums["s"])
    if len(blocks) != len(checksums["b"]):
        raise ValueError("not one checksum for each block")
    info = RunInfo(file_name(blocks), file_bytes, bytes.fromhex(metadata.parent), blocks)
    return Header(info, metadata.namespace, data_start, entries, checksums)


def _block_entries(
    metadata: RunMetadata, entries: dict[str, Entry], snapshots: list[str]
) -> tuple[BlockEntry, ...]:
    keys = [bytes.fromhex(key) for key in metadata.keys.split(",")]
    tokens = [b64decode(text, validate=True) for text in metadata.tokens.split(",")]
    sizes = {"b": [0] * len(keys), "s": [0] * len(keys)}
    for tensor, entry in entries.items():
        start, end = entry.data_offsets
        sizes[tensor[0]][int(tensor[1:].partition(".")[0])] += end - start
    return tuple(
        BlockEntry(key, block_tokens, payload, None if checksum == NONE else snapshot)
        for key, block_tokens, payload, snapshot, checksum in zip(
            keys, tokens, sizes["b"], sizes["s"], snapshots, strict=True
        )
    )
