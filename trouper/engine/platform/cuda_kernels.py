"""CUDA kernels of ours, and their trial before use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx

from trouper.engine.platform.error_text import line_of

INCLUDED = Path(__file__).with_name("tensor_cores.cuh")
Kernel = Callable[..., list[mx.array]]
"""As from `mlx.core.fast.cuda_kernel`."""


def kernel(
    name: str, file: Path, inputs: Sequence[str], source: str, outputs: Sequence[str] = ("out",)
) -> Kernel:
    """A kernel that calls functions of the included files, as MLX hashes the source at each
    launch."""
    header = "".join(f'#include "{each.as_posix()}"\n' for each in (INCLUDED, file))
    compiled = mx.fast.cuda_kernel(
        name=name,
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
        header=header,
    )
    return cast(Kernel, compiled)


def fault_of(errors: Callable[[], mx.array], bound: float) -> str:
    """Why a kernel cannot be used, or "": `errors` raises or reaches the bound."""
    try:
        right = mx.abs(errors()).max().item() < bound  # type: ignore[operator]
    except Exception as error:  # noqa: BLE001
        # Whatever the device's compiler or driver says, there is another way.
        return line_of(error)
    return "" if right else "its results are wrong"
