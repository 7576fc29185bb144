"""MLX's Linux CPU wheel multiplies by the reference BLAS, which is many times slower than OpenBLAS.

Fault: the wheel links libblas. OpenBLAS's symbols have a prefix in scipy-openblas32; aliases are
made here.
Seen: MLX 0.32.4, scipy-openblas32 0.3.34.
Upstream: no report was found in November 2026.
Without: float32 products of a CPU take many times as long (docs/workarounds.md).
"""

# The dynamic linker binds a symbol to the first global definition, and a definition may be an
# absolute address. An ELF image of one symbol table is therefore enough to let `cblas_sgemm` mean
# `scipy_cblas_sgemm` for every library that is loaded later. Layout: System V ABI, chapters 4 and
# 5; absolute symbols as glibc 2.28 and musl read them.
#
# Wheels with plain names (measured, docs/workarounds.md): cmeel-openblas is compiled for one kind
# of processor and needs a libgfortran of the system; mkl is 220 MB and slower for prompts on AMD.

from __future__ import annotations

import ctypes
import logging
import os
import struct
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from trouper import workarounds
from trouper.workarounds import openblas_vector_products

log = logging.getLogger("trouper")
SGEMM = "cblas_sgemm"

# All BLAS imports of libmlx.so. A forward pass never calls LAPACK.
FUNCTIONS = (SGEMM, "cblas_dgemm", "cblas_cgemm")
HEADER, SEGMENT, ENTRY, SYMBOL = "<16sHHIQQQIHHHHHH", "<IIQQQQQQ", "<QQ", "<IBBHQQ"
ELF64_LITTLE = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
SHARED_OBJECT, READ_WRITE, LARGEST_PAGE = 3, 6, 65536
PT_LOAD, PT_DYNAMIC, PT_GNU_STACK = 1, 2, 0x6474E551
DT_NULL, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT = 0, 4, 5, 6, 10, 11
GLOBAL_FUNCTION, SHN_ABS = 0x12, 0xFFF1


@cache
def load_fast() -> Path | None:
    """Let MLX find OpenBLAS, if installed (threads: OPENBLAS_NUM_THREADS).

    Returns the library, also later; None for other builds of MLX, or after an import of MLX.
    """
    library = _find_library()
    if library is None or "mlx.core" in sys.modules or not workarounds.is_active(__name__):
        return None
    try:
        openblas = ctypes.CDLL(str(library))
        addresses = {name: _address(openblas, f"scipy_{name}") for name in FUNCTIONS}
        addresses[SGEMM] = openblas_vector_products.forward(
            addresses[SGEMM], _address(openblas, "scipy_cblas_sgemv")
        )
        publish(addresses, like=library)
    except (OSError, AttributeError) as error:
        log.warning("MLX multiplies by its own BLAS, which is slow: %s: %s", library, error)
        return None
    return library


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def _find_library() -> Path | None:
    spec = find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        return None
    return next((Path(spec.origin).parent / "lib").glob("libscipy_openblas*.so"), None)


def publish(addresses: Mapping[str, int], like: Path) -> None:
    """Define the names in this process. `like`: a library for this machine. Raises OSError."""
    descriptor = os.memfd_create("names")
    try:
        os.write(descriptor, image(addresses, like.read_bytes()[:20]))
        ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_GLOBAL)
    finally:
        os.close(descriptor)


def image(addresses: Mapping[str, int], like: bytes) -> bytes:
    """Build the ELF file. `like`: the beginning of an ELF file of this machine."""
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
    """A hash table with one bucket: a linked list without a hash."""
    following = [0, *range(2, symbols), 0]
    return struct.pack(f"<{3 + symbols}I", 1, symbols, 1, *following)


def _segment(kind: int, begin: int, size: int, align: int) -> bytes:
    elf64_phdr = kind, READ_WRITE, begin, begin, begin, size, size, align
    return struct.pack(SEGMENT, *elf64_phdr)
