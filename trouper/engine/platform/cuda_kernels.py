"""CUDA kernels of ours: how MLX gets them, and their trial before they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx

from trouper.engine.platform.error_text import line_of

Kernel = Callable[..., list[mx.array]]
"""As `mlx.core.fast.cuda_kernel` returns it."""


def kernel(
    name: str, file: Path, inputs: Sequence[str], source: str, outputs: Sequence[str] = ("out",)
) -> Kernel:
    """A kernel whose source calls what the file defines. The file is included, since MLX hashes a
    kernel's source at each launch."""
    header = f'#include "{file.as_posix()}"\n'
    compiled = mx.fast.cuda_kernel(
        name=name,
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
        header=header,
    )
    return cast(Kernel, compiled)


def fault_of(errors: Callable[[], mx.array], bound: float) -> str:
    """Why a kernel cannot be used; "" if it can: nothing raises, and no error of its results, of
    any shape, reaches the bound. A device may have fewer registers than it needs, or a compiler
    that refuses it."""
    try:
        right = mx.abs(errors()).max().item() < bound  # type: ignore[operator]
    except Exception as error:  # noqa: BLE001 - whatever the device's compiler or driver says, there is another way
        return line_of(error)
    return "" if right else "its results are wrong"
