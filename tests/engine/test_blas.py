"""OpenBLAS under MLX, in a process of its own: what is bound at import cannot be bound again."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest

from tests.arithmetic import cpu_only
from trouper.engine.platform import elf_alias, openblas

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
    import mlx.core  # noqa: F401 - the point: it is imported

    assert openblas.load_fast() is None
