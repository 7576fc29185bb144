"""OpenBLAS under MLX, which is bound at import."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from trouper.workarounds import VARIABLE, mlx_reference_blas, openblas_vector_products
from trouper.workarounds.mlx_reference_blas import load_fast


def test_a_library_of_names_is_well_formed() -> None:
    elf = mlx_reference_blas.image(
        {"one": 0x1000, "two": 0x2000},
        struct.pack("<16sHH", mlx_reference_blas.ELF64_LITTLE, 3, 183),
    )
    assert struct.unpack_from("<H", elf, 18) == (183,)
    assert elf.endswith(b"\0one\0two\0")
    with pytest.raises(OSError, match="ELF"):
        mlx_reference_blas.image({}, b"\xcf\xfa\xed\xfe" * 8)


def test_too_late_is_a_no_op() -> None:
    assert load_fast.__wrapped__() is None


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


def addresses() -> tuple[int, int]:
    """Addresses of OpenBLAS's own `cblas_sgemm` and `cblas_sgemv`."""
    library = ctypes.CDLL(str(load_fast()))
    sgemm, sgemv = (
        ctypes.cast(getattr(library, f"scipy_cblas_{name}"), ctypes.c_void_p)
        for name in ("sgemm", "sgemv")
    )
    assert sgemm.value is not None
    assert sgemv.value is not None
    return sgemm.value, sgemv.value


@pytest.mark.skipif(load_fast() is None, reason="OpenBLAS")
def test_products_run_on_openblas() -> None:
    """MLX's have each bit of OpenBLAS's own, which adds in another order than a BLAS that adds one
    product after another, as the one of MLX's wheel does."""
    random, size = np.random.default_rng(0), 64
    left, right = (
        random.standard_normal((size, 768), np.float32),
        random.standard_normal((768, size), np.float32),
    )
    own, one_by_one = np.zeros((size, size), np.float32), np.zeros((size, size), np.float32)
    multiply = openblas_vector_products.Product(addresses()[0])
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


PRODUCT = """
import sys
import numpy as np
from trouper.process import prepare_process
prepare_process()
import mlx.core as mx
left, right = map(mx.array, np.load(sys.argv[1]).values())
np.save(sys.argv[2], np.array(mx.matmul(left, right, stream=mx.cpu)))
"""


@pytest.mark.skipif(load_fast() is None, reason="OpenBLAS is not installed")
def test_it_is_still_needed(tmp_path: Path) -> None:
    """The BLAS of MLX's wheel still adds one product after another, as only a slow one does."""
    random = np.random.default_rng(0)
    left, right = (random.standard_normal(shape, np.float32) for shape in ((64, 768), (768, 64)))
    np.savez(tmp_path / "factors.npz", left=left, right=right)
    files = [str(tmp_path / name) for name in ("factors.npz", "product.npy")]
    environment = {**os.environ, VARIABLE: "mlx_reference_blas"}
    subprocess.run([sys.executable, "-c", PRODUCT, *files], check=True, env=environment)
    one_by_one = np.zeros((64, 64), np.float32)
    for index in range(768):
        one_by_one += np.outer(left[:, index], right[index])
    assert np.array_equal(np.load(files[1]), one_by_one)
