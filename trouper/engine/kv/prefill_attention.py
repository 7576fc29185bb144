"""Attention over chunks of prompts, as one kernel that knows each row's slot and length."""

# cuDNN, which MLX uses for such passes, plans each new number of rows, tokens and keys, 42 ms on an
# H200, and with masks takes three to five times as long. This kernel (`prefill_kernel.py`) needs
# neither. Without a mask, and with a plan, cuDNN takes half as long for long chunks
# (`Shapes.tiled`).

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from trouper.engine.kv import prefill_kernel
from trouper.engine.kv.decode_attention import TRIED_ERROR, draw, fits, mask_of
from trouper.engine.kv.decode_kernel import Heads
from trouper.engine.kv.prefill_kernel import DTYPES, TILES, PrefillCall
from trouper.engine.kv.whole_buffer import WholeBuffer
from trouper.engine.passes.region import Ints
from trouper.engine.platform.cuda_kernels import fault_of

log = logging.getLogger(__name__)

# Rows in the trial: no token before the chunk, a part of a tile of keys, a second and a third one.
TRIED_LENGTHS, TRIED_WIDTH = np.array([0, 3, 70, 129], np.int32), 70


def supports(
    queries: mx.array, keys: WholeBuffer, values: WholeBuffer, options: dict[str, Any]
) -> bool:
    """Whether the kernel allows the call: 16 bits, equal dimensions of keys and values, no options
    but sinks."""
    return (
        queries.shape[3] in TILES
        and queries.dtype in DTYPES
        and fits(queries, keys, values, options)
        and computes(_heads(queries, keys, options), appended=_is_appended(keys))
    )


def _heads(queries: mx.array, keys: WholeBuffer, options: dict[str, Any]) -> Heads:
    sinks = options.get("sinks") is not None
    dim = queries.shape[3]
    return Heads(queries.dtype, dim, 1, 1, window=keys.window, ring=keys.ring, sinks=sinks)


def _is_appended(keys: WholeBuffer) -> bool:
    return keys.gathered and keys.ring > 0


@cache
def computes(heads: Heads, *, appended: bool) -> bool:
    """Try once whether the device runs the kernel, and correctly; otherwise chunks get MLX's
    attention."""
    width = TRIED_WIDTH if appended or not heads.ring else max(1 + heads.ring - heads.window, 1)
    call, expected = example(heads, TRIED_LENGTHS, width, appended=appended)
    fault = fault_of(
        lambda: prefill_kernel.run(heads, call).astype(mx.float32) - expected, TRIED_ERROR
    )
    if fault:
        log.warning("attention over chunks by lengths is not used for %s: %s", heads, fault)
    return not fault


def example(
    heads: Heads, lengths: Ints, width: int, *, appended: bool = False
) -> tuple[PrefillCall, mx.array]:
    """A call with random numbers, a row of each length, and what MLX's attention makes of it in
    float32, (n, heads, width, dim)."""
    mask = mask_of(attrs.evolve(heads, ring=0), lengths, width, int(lengths.max()) + width)
    (queries, keys, values), sinks, expected = draw(heads, mask)
    if heads.ring:
        positions = _positions_of_ring(heads.ring, lengths, width, appended=appended)
        keys, values = (mx.take_along_axis(part, positions, axis=2) for part in (keys, values))
    rows = mx.array(np.stack([np.arange(len(lengths), dtype=np.int32), lengths], axis=1))
    call = PrefillCall(queries, keys, values, rows, heads.dim**-0.5, sinks=sinks, appended=appended)
    return call, expected


def _positions_of_ring(ring: int, lengths: Ints, width: int, *, appended: bool) -> mx.array:
    # (n, 1, any, 1): the position at each index, 0 where there is none yet.
    last = (lengths if appended else lengths + width)[:, None] - 1
    positions = last - (last - np.arange(ring)) % ring
    if appended:
        positions = np.concatenate([positions, lengths[:, None] + np.arange(width)], axis=1)
    return mx.array(np.maximum(positions, 0)[:, None, :, None])


def attend(
    queries: mx.array, keys: WholeBuffer, values: WholeBuffer, options: dict[str, Any]
) -> mx.array:
    """Attention of queries (n, heads, width, dim) up to their own positions, where `supports`.
    Returns (n, heads, width, dim)."""
    region = keys.region
    call = PrefillCall(
        queries,
        keys.buffer,
        values.buffer,
        region.indices_and_lengths if keys.gathered else region.slots_and_lengths,
        options["scale"],
        sinks=options.get("sinks"),
        appended=_is_appended(keys),
    )
    return prefill_kernel.run(_heads(queries, keys, options), call)
