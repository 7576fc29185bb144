"""Builds a shared library that contains only symbols: aliases of functions that are already loaded.

The dynamic linker binds a symbol to the first global definition, and a definition may be an
absolute address. So an ELF image of one symbol table is enough to let `cblas_sgemm` mean
`scipy_cblas_sgemm` for every library loaded later. No compiler, no machine code, no file left
behind. Layout: System V ABI, chapters 4 and 5; absolute symbols as glibc 2.28 and musl read them.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping
from pathlib import Path

HEADER, SEGMENT, ENTRY, SYMBOL = "<16sHHIQQQIHHHHHH", "<IIQQQQQQ", "<QQ", "<IBBHQQ"
ELF64_LITTLE = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
SHARED_OBJECT, READ_WRITE, LARGEST_PAGE = 3, 6, 65536
PT_LOAD, PT_DYNAMIC, PT_GNU_STACK = 1, 2, 0x6474E551
DT_NULL, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT = 0, 4, 5, 6, 10, 11
GLOBAL_FUNCTION, SHN_ABS = 0x12, 0xFFF1


def publish(addresses: Mapping[str, int], like: Path) -> None:
    """Define the names globally, in this process. `like` is a library for this machine. Raises
    OSError."""
    descriptor = os.memfd_create("names")
    try:
        os.write(descriptor, image(addresses, like.read_bytes()[:20]))
        ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_GLOBAL)
    finally:
        os.close(descriptor)


def image(addresses: Mapping[str, int], like: bytes) -> bytes:
    """Build the ELF file. `like`: the first bytes of an ELF file of this machine, which contain the
    machine number."""
    if like[:7] != ELF64_LITTLE[:7]:
        raise OSError("not a little-endian 64-bit ELF file")
    (machine,) = struct.unpack_from("<H", like, 18)
    table, strings = _symbols(addresses)
    links = _one_bucket(len(addresses) + 1)
    begin_dynamic = struct.calcsize(HEADER) + 3 * struct.calcsize(SEGMENT)
    begin_table = begin_dynamic + 6 * struct.calcsize(ENTRY)
    begin_links = begin_table + len(table)
    begin_strings = begin_links + len(links)
    size = begin_strings + len(strings)
    # Named as in <elf.h>.
    elf64_ehdr = ELF64_LITTLE, SHARED_OBJECT, machine, 1, 0, 64, 0, 0, 64, 56, 3, 64, 0, 0
    header = struct.pack(HEADER, *elf64_ehdr)
    segments = (
        _segment(PT_LOAD, 0, size, LARGEST_PAGE)
        + _segment(PT_DYNAMIC, begin_dynamic, begin_table - begin_dynamic, 8)
        + _segment(PT_GNU_STACK, 0, 0, 16)  # without it the stack would have to be executable
    )
    dynamic = (
        (DT_HASH, begin_links),
        (DT_SYMTAB, begin_table),
        (DT_STRTAB, begin_strings),
        (DT_STRSZ, len(strings)),
        (DT_SYMENT, struct.calcsize(SYMBOL)),
        (DT_NULL, 0),
    )
    return (
        header
        + segments
        + b"".join(struct.pack(ENTRY, *entry) for entry in dynamic)
        + table
        + links
        + strings
    )


def _symbols(addresses: Mapping[str, int]) -> tuple[bytes, bytes]:
    table, strings = bytes(struct.calcsize(SYMBOL)), b"\0"
    for name, address in addresses.items():
        elf64_sym = len(strings), GLOBAL_FUNCTION, 0, SHN_ABS, address, 0
        table += struct.pack(SYMBOL, *elf64_sym)
        strings += name.encode() + b"\0"
    return table, strings


def _one_bucket(symbols: int) -> bytes:
    """Build a hash table with one bucket, which is a linked list and needs no hash: each symbol
    refers to the next."""
    following = [0, *range(2, symbols), 0]
    return struct.pack(f"<{3 + symbols}I", 1, symbols, 1, *following)


def _segment(kind: int, begin: int, size: int, align: int) -> bytes:
    elf64_phdr = kind, READ_WRITE, begin, begin, begin, size, size, align
    return struct.pack(SEGMENT, *elf64_phdr)
