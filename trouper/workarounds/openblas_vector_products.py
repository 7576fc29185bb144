"""OpenBLAS multiplies one row on x86-64 as a matrix, which takes longer than a vector.

Fault: OpenBLAS forwards `cblas_sgemm` of one row to `cblas_sgemv` on 64-bit Arm alone
(GEMM_GEMV_FORWARD in Makefile.system).
Seen: scipy-openblas32 0.3.34.
Upstream: https://github.com/OpenMathLib/OpenBLAS/pull/4814 (arm64 alone: exactness of x86-64).
Without: products of one row take 1.2 to 1.8 times as long (docs/workarounds.md).
"""

# `cblas_sgemm` becomes these instructions, which compare four arguments, call `cblas_sgemv` for
# each of up to two rows, and jump to OpenBLAS's own `cblas_sgemm` for everything else. Of two rows,
# the second finds the matrix in a cache; three take as long either way. No compiler is on a user's
# machine: the bytes were made by the GNU assembler. Calling convention: System V ABI for x86-64,
# 3.2.3: integers in edi, esi, edx, ecx, r8, r9, then on the stack in units of eight bytes; alpha
# and beta in xmm0 and xmm1, where both functions have them.

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
from typing import Any

from trouper import workarounds

ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112
"""From cblas.h."""
# cblas_sgemm(order, transA, transB, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc); k numbers of A
# times B (k, n), or (n, k) transposed.
CODE = """
f30f1efa            endbr64
8d41ff              lea    eax, [rcx - 1]       # m
83f801              cmp    eax, 1               # one row or two
0f87ee000000        ja     gemm
83ff65              cmp    edi, 101             # row-major
0f85e5000000        jne    gemm
83fe6f              cmp    esi, 111             # A as it is
0f85dc000000        jne    gemm
83fa70              cmp    edx, 112             # B transposed: a matrix (n, k), as weights are
7416                je     turned
83fa6f              cmp    edx, 111             # B as it is: a matrix (k, n)
0f85ce000000        jne    gemm
be70000000          mov    esi, 112             # transposed
4489ca              mov    edx, r9d             # rows: k
4489c0              mov    eax, r8d             # columns: n
eb06                jmp    gemv
4489c2     turned:  mov    edx, r8d             # rows: n
4489c8              mov    eax, r9d             # columns: k
4883ec58   gemv:    sub    rsp, 88
89742420            mov    [rsp + 32], esi      # kept for the second row
89542424            mov    [rsp + 36], edx
89442428            mov    [rsp + 40], eax
894c242c            mov    [rsp + 44], ecx      # rows that are left
f30f11442430        movss  [rsp + 48], xmm0
f30f114c2434        movss  [rsp + 52], xmm1
488b442460          mov    rax, [rsp + 96]      # A
4889442438          mov    [rsp + 56], rax
488b842480000000    mov    rax, [rsp + 128]     # C
4889442440          mov    [rsp + 64], rax
bf65000000  row:    mov    edi, 101
8b742420            mov    esi, [rsp + 32]
8b542424            mov    edx, [rsp + 36]
8b4c2428            mov    ecx, [rsp + 40]
f30f10442430        movss  xmm0, [rsp + 48]
f30f104c2434        movss  xmm1, [rsp + 52]
4c8b442470          mov    r8, [rsp + 112]      # B
448b4c2478          mov    r9d, [rsp + 120]     # ldb
488b442438          mov    rax, [rsp + 56]
48890424            mov    [rsp], rax           # x: this row of A
48c744240801000000  mov    qword [rsp + 8], 1   # its stride
488b442440          mov    rax, [rsp + 64]
4889442410          mov    [rsp + 16], rax      # y: this row of C
48c744241801000000  mov    qword [rsp + 24], 1  # its stride
48b8SGEMV           movabs rax, cblas_sgemv
ffd0                call   rax
ff4c242c            dec    dword [rsp + 44]
7421                je     done
4863442468          movsxd rax, dword [rsp + 104]  # lda
48c1e002            shl    rax, 2
4801442438          add    [rsp + 56], rax
4863842488000000    movsxd rax, dword [rsp + 136]  # ldc
48c1e002            shl    rax, 2
4801442440          add    [rsp + 64], rax
eb81                jmp    row
4883c458    done:   add    rsp, 88
c3                  ret
48b8SGEMM   gemm:   movabs rax, cblas_sgemm
ffe0                jmp    rax
"""
INT, FLOAT, POINTER = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
MATRIX = (POINTER, INT)
ARGUMENTS: tuple[Any, ...] = (*[INT] * 6, FLOAT, *MATRIX, *MATRIX, FLOAT, *MATRIX)
Product = ctypes.CFUNCTYPE(None, *ARGUMENTS)


def forward(sgemm: int, sgemv: int, *, machine: str = platform.machine()) -> int:
    """A `cblas_sgemm`'s address that calls `sgemv` for one row or two; else `sgemm`."""
    is_x86 = machine == "x86_64" and struct.calcsize("P") == 8
    if not is_x86 or not workarounds.is_active(__name__):
        return sgemm
    try:
        address = _mapped(code(sgemm, sgemv))
    except OSError:
        return sgemm
    return address if _is_right(address) else sgemm


def code(sgemm: int, sgemv: int) -> bytes:
    digits = "".join(line.split()[0] for line in CODE.strip().splitlines())
    for name, address in (("SGEMV", sgemv), ("SGEMM", sgemm)):
        digits = digits.replace(name, struct.pack("<Q", address).hex())
    return bytes.fromhex(digits)


def _mapped(instructions: bytes) -> int:
    """Map code, never writable and executable at once. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = POINTER
    libc.mmap.argtypes = [POINTER, ctypes.c_size_t, *[INT] * 3, ctypes.c_long]
    descriptor = os.memfd_create("vector_products")
    try:
        os.write(descriptor, instructions)
        arguments = (
            None,
            len(instructions),
            mmap.PROT_READ | mmap.PROT_EXEC,
            mmap.MAP_PRIVATE,
            descriptor,
            0,
        )
        address = libc.mmap(*arguments)
    finally:
        os.close(descriptor)
    if address is None or address == POINTER(-1).value:
        raise OSError(ctypes.get_errno(), "code cannot be mapped")
    return int(address)


def _is_right(address: int) -> bool:
    multiply = Product(address)
    matrix = (FLOAT * 6)(*range(1, 7))
    rows = (FLOAT * 9)(*(1, 10, 100), *(2, 20, 200), *(3, 30, 300))
    expected = {
        PLAIN: [531.0, 642.0, 1062.0, 1284.0, 1593.0, 1926.0],
        TRANSPOSED: [321.0, 654.0, 642.0, 1308.0, 963.0, 1962.0],
    }
    for turned, values in expected.items():
        for m in (1, 2, 3):
            product = (FLOAT * 6)(*[-1] * 6)
            width = 3 if turned == TRANSPOSED else 2
            arguments = (
                ROW_MAJOR,
                PLAIN,
                turned,
                m,
                2,
                3,
                1.0,
                rows,
                3,
                matrix,
                width,
                0.0,
                product,
                2,
            )
            multiply(*arguments)
            if list(product)[: 2 * m] != values[: 2 * m]:
                return False
    return True
