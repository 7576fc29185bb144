"""OpenBLAS under MLX, which is bound at import."""

from __future__ import annotations

import ctypes
import platform
import struct

import mlx.core as mx
import numpy as np
import pytest

import trouper.engine
from trouper.engine.platform import elf_alias, openblas, vector_products


def test_a_library_of_names_is_well_formed() -> None:
    elf = elf_alias.image(
        {"one": 0x1000, "two": 0x2000}, struct.pack("<16sHH", elf_alias.ELF64_LITTLE, 3, 183)
    )
    assert struct.unpack_from("<H", elf, 18) == (183,)
    assert elf.endswith(b"\0one\0two\0")
    with pytest.raises(OSError, match="ELF"):
        elf_alias.image({}, b"\xcf\xfa\xed\xfe" * 8)


def test_too_late_is_a_no_op() -> None:
    assert openblas.load_fast() is None


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("turned", [False, True])
def test_products_of_few_rows_are_right_like_those_of_several(rows: int, turned: bool) -> None:
    """Whatever BLAS MLX uses: with weights (n, k), and with matrices (k, n), also where they are a
    part of a larger one."""
    random = np.random.default_rng(rows)
    vectors = random.standard_normal((rows, 70), np.float32)
    whole = random.standard_normal((90, 200) if turned else (200, 90), np.float32)
    matrix, part = (
        (whole[:50, :70], (slice(50), slice(70)))
        if turned
        else (whole[:70, :50], (slice(70), slice(50)))
    )
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
        ctypes.cast(getattr(library, f"scipy_cblas_{name}"), ctypes.c_void_p)
        for name in ("sgemm", "sgemv")
    )
    assert sgemm.value is not None
    assert sgemv.value is not None
    return sgemm.value, sgemv.value


@pytest.mark.skipif(trouper.engine.FAST_BLAS is None, reason="OpenBLAS")
def test_products_run_on_openblas() -> None:
    """MLX's have each bit of OpenBLAS's own, which adds in another order than a BLAS that adds one
    product after another, as the one of MLX's wheel does."""
    random, size = np.random.default_rng(0), 64
    left, right = (
        random.standard_normal((size, 768), np.float32),
        random.standard_normal((768, size), np.float32),
    )
    own, one_by_one = np.zeros((size, size), np.float32), np.zeros((size, size), np.float32)
    multiply = vector_products.Product(addresses()[0])
    pointers = [array.ctypes.data for array in (left, right, own)]
    multiply(
        101,
        111,
        111,
        size,
        size,
        768,
        1.0,
        pointers[0],
        768,
        pointers[1],
        size,
        0.0,
        pointers[2],
        size,
    )
    for index in range(768):
        one_by_one += np.outer(left[:, index], right[index])
    product = np.array(mx.matmul(mx.array(left), mx.array(right), stream=mx.cpu))
    assert np.array_equal(product, own)
    assert np.allclose(product, one_by_one, atol=1e-3)
    assert not np.array_equal(product, one_by_one)


INT, FLOAT, MATRIX = vector_products.INT, vector_products.FLOAT, vector_products.MATRIX
VectorProduct = ctypes.CFUNCTYPE(None, *[INT] * 4, FLOAT, *MATRIX, *MATRIX, FLOAT, *MATRIX)
"""Type of `cblas_sgemv`."""


@needs_openblas
def test_one_row_and_two_are_vector_products_and_three_are_not() -> None:
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
    vectors, matrix = (ctypes.c_float * 15)(*range(15)), (ctypes.c_float * 12)(*range(12))
    wanted = [
        5.0,
        14.0,
        23.0,
        32.0,
        -1.0,
        -1.0,
        20.0,
        74.0,
        128.0,
        182.0,
        -1.0,
        -1.0,
        35.0,
        134.0,
        233.0,
        332.0,
        -1.0,
        -1.0,
    ]
    for rows in (0, 1, 2, 3):
        result = (ctypes.c_float * 18)(*[-1.0] * 18)
        product(101, 111, 112, rows, 4, 3, 1.0, vectors, 5, matrix, 3, 0.0, result, 6)
        assert [*result] == [*wanted[: 6 * rows], *[-1.0] * (18 - 6 * rows)]
    assert calls == [(101, 111, 4, 3)] * 3


@needs_openblas
def test_a_vector_product_that_is_wrong_is_not_used() -> None:
    sgemm, _ = addresses()

    wrong = VectorProduct(lambda *_: None)
    assert (
        vector_products.forwarding(sgemm, ctypes.cast(wrong, ctypes.c_void_p).value or 0) == sgemm
    )


@needs_openblas
def test_other_processors_keep_their_products() -> None:
    sgemm, sgemv = addresses()
    assert vector_products.forwarding(sgemm, sgemv, machine="aarch64") == sgemm


def test_the_instructions_are_as_many_bytes_as_the_jumps_say() -> None:
    """Targets of the jumps, as offsets: what follows each is named in the listing."""
    made = vector_products.code(0, 0)
    far = {
        at: int.from_bytes(made[at : at + 4], "little") + at + 4 for at in (0x0C, 0x15, 0x1E, 0x2C)
    }
    assert set(far.values()) == {0xFE}, "to OpenBLAS's own"
    near = {at: made[at] + at + 1 for at in (0x26, 0x3C, 0xD7)}
    assert near == {0x26: 0x3D, 0x3C: 0x43, 0xD7: 0xF9}
    assert made[0xF8] - 0x100 + 0xF9 == 0x7A, "the next row"
    assert len(made) == 0x10A
