"""OpenBLAS under MLX, in a process of its own: what is bound at import cannot be bound again."""

from __future__ import annotations

import ctypes
import platform
import struct
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

import trouper.engine
from tests.arithmetic import cpu_only
from trouper.engine.platform import elf_alias, openblas, vector_products

PROBE = """
import trouper.engine, time, sys
import mlx.core as mx
a = mx.random.normal((768, 768), key=mx.random.key(1), stream=mx.cpu)
b = mx.eye(768, stream=mx.cpu)
mx.eval(a, b)
began = time.perf_counter()
c = mx.matmul(a, b, stream=mx.cpu)
mx.eval(c)
took = time.perf_counter() - began
assert mx.array_equal(a, c, stream=mx.cpu).item()
print(2 * 768**3 / took / 1e9)
"""


@cpu_only
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the Linux CPU build's BLAS")
def test_products_run_on_openblas() -> None:
    """The reference BLAS reaches 2.5 to 5 GFLOP/s, however idle the machine; OpenBLAS over 60 a core."""
    speeds = [
        float(subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True).stdout)
        for _ in range(2)
    ]
    assert max(speeds) > 15


def test_a_library_of_names_is_well_formed() -> None:
    elf = elf_alias.image({"one": 0x1000, "two": 0x2000}, struct.pack("<16sHH", elf_alias.ELF64_LITTLE, 3, 183))
    assert struct.unpack_from("<H", elf, 18) == (183,)
    assert elf.endswith(b"\0one\0two\0")
    with pytest.raises(OSError, match="ELF"):
        elf_alias.image({}, b"\xcf\xfa\xed\xfe" * 8)


def test_too_late_is_a_no_op() -> None:
    assert openblas.load_fast() is None


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("turned", [False, True])
def test_products_of_one_row_are_right_like_those_of_several(rows: int, turned: bool) -> None:
    """Whatever BLAS MLX uses: with weights (n, k), and with matrices (k, n), also where they are a part of a larger one."""
    random = np.random.default_rng(rows)
    vectors = random.standard_normal((rows, 70), np.float32)
    whole = random.standard_normal((90, 200) if turned else (200, 90), np.float32)
    matrix, part = (whole[:50, :70], (slice(50), slice(70))) if turned else (whole[:70, :50], (slice(70), slice(50)))
    given = mx.array(whole)[part]
    product = mx.matmul(mx.array(vectors), given.T if turned else given, stream=mx.cpu)
    assert np.allclose(product, vectors @ (matrix.T if turned else matrix), atol=1e-4)


needs_openblas = pytest.mark.skipif(
    trouper.engine.FAST_BLAS is None or platform.machine() != "x86_64", reason="OpenBLAS on x86-64"
)


def addresses() -> tuple[int, int]:
    """Addresses of OpenBLAS's own `cblas_sgemm` and `cblas_sgemv`."""
    library = ctypes.CDLL(str(trouper.engine.FAST_BLAS))
    sgemm, sgemv = (
        ctypes.cast(getattr(library, f"scipy_cblas_{name}"), ctypes.c_void_p) for name in ("sgemm", "sgemv")
    )
    assert sgemm.value is not None
    assert sgemv.value is not None
    return sgemm.value, sgemv.value


INT, FLOAT, MATRIX = vector_products.INT, vector_products.FLOAT, vector_products.MATRIX
VectorProduct = ctypes.CFUNCTYPE(None, *[INT] * 4, FLOAT, *MATRIX, *MATRIX, FLOAT, *MATRIX)
"""Type of `cblas_sgemv`."""


@needs_openblas
def test_one_row_is_a_vector_product_and_two_are_not() -> None:
    sgemm, sgemv = addresses()
    calls = []

    def counted(*arguments: float) -> None:
        calls.append(arguments[:4])
        VectorProduct(sgemv)(*arguments)

    callback = VectorProduct(counted)
    product = vector_products.Product(
        vector_products.forwarding(sgemm, ctypes.cast(callback, ctypes.c_void_p).value or 0)
    )
    calls.clear()
    vectors, matrix, result = (ctypes.c_float * 6)(*range(6)), (ctypes.c_float * 12)(*range(12)), (ctypes.c_float * 8)()
    for rows in (1, 2):
        product(101, 111, 112, rows, 4, 3, 1.0, vectors, 3, matrix, 3, 0.0, result, 4)
    assert calls == [(101, 111, 4, 3)]
    assert [*result] == [5.0, 14.0, 23.0, 32.0, 14.0, 50.0, 86.0, 122.0]


@needs_openblas
def test_a_vector_product_that_is_wrong_is_not_used() -> None:
    sgemm, _ = addresses()

    wrong = VectorProduct(lambda *_: None)
    assert vector_products.forwarding(sgemm, ctypes.cast(wrong, ctypes.c_void_p).value or 0) == sgemm


@needs_openblas
def test_other_processors_keep_their_products() -> None:
    sgemm, sgemv = addresses()
    assert vector_products.forwarding(sgemm, sgemv, machine="aarch64") == sgemm


def test_the_instructions_are_as_many_bytes_as_the_jumps_say() -> None:
    """Targets of the jumps, as offsets: what follows each is named in the listing."""
    made = vector_products.code(0, 0)
    assert (made[0x08] + 0x09, made[0x17] + 0x18, made[0x29] + 0x2A) == (0x74, 0x2A, 0x30)
    assert len(made) == 0x80
