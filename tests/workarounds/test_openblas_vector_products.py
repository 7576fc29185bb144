"""Products of one row and of two on x86-64, as vector products."""

from __future__ import annotations

import ctypes
import platform

import numpy as np
import pytest

from tests.workarounds.test_mlx_reference_blas import addresses
from trouper.workarounds import VARIABLE, openblas_vector_products
from trouper.workarounds.mlx_reference_blas import load_fast

needs_openblas = pytest.mark.skipif(
    load_fast() is None or platform.machine() != "x86_64", reason="OpenBLAS on x86-64"
)
INT, FLOAT, MATRIX = (
    openblas_vector_products.INT,
    openblas_vector_products.FLOAT,
    openblas_vector_products.MATRIX,
)
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
    product = openblas_vector_products.Product(
        openblas_vector_products.forward(sgemm, ctypes.cast(callback, ctypes.c_void_p).value or 0)
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
        openblas_vector_products.forward(sgemm, ctypes.cast(wrong, ctypes.c_void_p).value or 0)
        == sgemm
    )


@needs_openblas
def test_other_processors_keep_their_products() -> None:
    sgemm, sgemv = addresses()
    assert openblas_vector_products.forward(sgemm, sgemv, machine="aarch64") == sgemm


def test_the_instructions_are_as_many_bytes_as_the_jumps_say() -> None:
    """Targets of the jumps, as offsets: what follows each is named in the listing."""
    made = openblas_vector_products.code(0, 0)
    far = {
        at: int.from_bytes(made[at : at + 4], "little") + at + 4 for at in (0x0C, 0x15, 0x1E, 0x2C)
    }
    assert set(far.values()) == {0xFE}, "to OpenBLAS's own"
    near = {at: made[at] + at + 1 for at in (0x26, 0x3C, 0xD7)}
    assert near == {0x26: 0x3D, 0x3C: 0x43, 0xD7: 0xF9}
    assert made[0xF8] - 0x100 + 0xF9 == 0x7A, "the next row"
    assert len(made) == 0x10A


@needs_openblas
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "openblas_vector_products")
    sgemm, sgemv = addresses()
    assert openblas_vector_products.forward(sgemm, sgemv) == sgemm


@needs_openblas
def test_it_is_still_needed() -> None:
    """OpenBLAS's product of one row has other roundings than that of a vector: it is another
    kernel's."""
    size = 1536
    random = np.random.default_rng(0)
    matrix, row = (random.standard_normal(shape, np.float32) for shape in ((size, size), size))
    results = []
    sgemm, sgemv = addresses()
    for address in (sgemm, openblas_vector_products.forward(sgemm, sgemv)):
        out = np.zeros(size, np.float32)
        first, second, third = (array.ctypes.data for array in (row, matrix, out))
        sizes = (1, size, size)
        multiply = openblas_vector_products.Product(address)
        multiply(101, 111, 112, *sizes, 1.0, first, size, second, size, 0.0, third, size)
        results.append(out)
    of_rows, of_vectors = results
    assert np.allclose(of_rows, of_vectors, atol=1e-3)
    assert not np.array_equal(of_rows, of_vectors)
