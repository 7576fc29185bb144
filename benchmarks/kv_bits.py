"""Quantized KV of live rows: decode steps, bytes and divergence against plain. `python -m
benchmarks.kv_bits`.

Steps of SmolLM2-135M over random KV, in steps with plain KV at the same rows and context.
"dequantize" is what the engine does; "quantized matmul" is mlx-lm's attention over packed values,
for comparison.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trouper.engine.kv.full_slots import FullSlots
from trouper.engine.kv.kv_layout import layout_of
from trouper.engine.kv.model_caches import slot_caches
from trouper.engine.kv.quantized_kv import PLAIN, KvFormat, QuantizedSlots
from trouper.engine.loading.model_loading import load
from trouper.engine.passes.region import Region
from trouper.engine.platform import device
from trouper.protocol.settings import Settings

STEPS = 5
TOKENS = 2000
FORMATS = {"8 bits": KvFormat(8), "8 bits, groups of 32": KvFormat(8, 32), "4 bits": KvFormat(4)}


class Packed(QuantizedSlots):
    """Attention gets the triples, and mlx-lm takes its quantized path because there are `bits`."""

    @property
    def bits(self) -> int:
        return self._kv.bits

    @property
    def group_size(self) -> int:
        return self._kv.group_size

    def keys_and_values(self) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
        parts = [self._view(buffer) for buffer in self.buffers]
        return tuple(parts[:3]), tuple(parts[3:])


def forward(model: nn.Module, caches: Sequence[FullSlots], tokens: mx.array, held: int) -> mx.array:
    """One pass of every row; logits (n, width, vocabulary)."""
    rows, width = tokens.shape
    region = Region(0, np.full(rows, held, np.int32), np.full(rows, width, np.int32), width)
    for cache in caches:
        cache.begin(region)
    logits: mx.array = model(tokens, cache=caches)
    for cache in caches:
        cache.finish()
    return logits


def fill(model: nn.Module, caches: Sequence[FullSlots], rows: int, tokens: int) -> None:
    """Random KV, in chunks: as a prefill would leave it, without its arithmetic."""
    shape = next(iter(layout_of(model, PLAIN).sliceable))
    heads, _, dim = shape.dims
    some = [mx.random.normal((rows, heads, 256, dim)).astype(shape.dtype) for _ in range(2)]
    for cache in caches:
        for first in range(0, tokens, 256):
            cache.begin(
                Region(0, np.full(rows, first, np.int32), np.full(rows, 256, np.int32), 256)
            )
            cache.update_and_fetch(*some)
            cache.finish()
        mx.eval(cache.state())


def step_s(model: nn.Module, caches: Sequence[FullSlots], rows: int, tokens: int) -> float:
    """Median seconds of a decode step with room for it in the buffers."""
    fill(model, caches, rows, tokens)
    times = []
    for step in range(STEPS + 1):
        began = time.perf_counter()
        best = mx.argmax(
            forward(model, caches, mx.ones((rows, 1), mx.int32), tokens + step)[:, -1], -1
        )
        mx.eval(best, [cache.state() for cache in caches])
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def decode_steps(model: nn.Module, rows: int, tokens: int) -> None:
    plain = step_s(model, slot_caches(model, PLAIN), rows, tokens)
    eight = step_s(model, slot_caches(model, KvFormat(8)), rows, tokens)
    packed = step_s(model, [Packed(KvFormat(8)) for _ in model.layers], rows, tokens)
    print(
        f"{rows:2} rows x {tokens:4}: plain {plain * 1000:7.1f} ms, "
        f"dequantize {eight / plain:5.2f}, quantized matmul {packed / plain:5.2f}"
    )


@attrs.frozen
class Divergence:
    """Of the next token's distribution, over a text."""

    mean_kl: float
    same_best: float


def divergence(
    model: nn.Module, tokens: Sequence[int], kv: KvFormat, chunk: int = 64
) -> Divergence:
    """KL(plain || quantized) in nats a token."""
    plain, quantized = slot_caches(model, PLAIN), slot_caches(model, kv)
    kl, same = [], []  # type: ignore[var-annotated]
    for first in range(0, len(tokens), chunk):
        some = mx.array([tokens[first : first + chunk]])
        wanted, got = (
            log_softmax(forward(model, caches, some, first)) for caches in (plain, quantized)
        )
        kl += (mx.exp(wanted) * (wanted - got)).sum(-1).reshape(-1).tolist()  # type: ignore[arg-type]
        same += (mx.argmax(wanted, -1) == mx.argmax(got, -1)).reshape(-1).tolist()  # type: ignore[arg-type]
    return Divergence(statistics.mean(kl), statistics.mean(same))


def log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, -1, keepdims=True)


def text() -> str:
    """English that every checkout has."""
    root = Path(__file__).parents[1]
    return "\n".join(
        path.read_text(encoding="utf-8")
        for path in (root / "README.md", *sorted(root.glob("docs/*.md")))
    )


def main() -> None:
    loaded = load(Settings(), print)
    model = loaded.model
    plain = layout_of(model, PLAIN)
    shapes = plain.sliceable
    bfloat16 = sum(int(np.prod(shape.dims)) for shape in shapes) * 2
    tokens = loaded.tokenizer.encode(text())[:TOKENS]
    print(
        f"{plain.token_bytes} bytes a token plain ({shapes[0].dtype}), {bfloat16} in bfloat16; "
        f"{len(tokens)} tokens of text"
    )
    for name, kv in FORMATS.items():
        far = divergence(model, tokens, kv)
        size = layout_of(model, kv).token_bytes / bfloat16
        print(
            f"{name}: {size:.3f} of bfloat16's bytes, mean KL {far.mean_kl:.1e}, same best token "
            f"{far.same_best:.1%}"
        )
    print(f"decode steps on {device.name()}, in plain steps")
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    for rows in (1, 8, 32):
        for context in (256, 1024, 4096):
            if rows * context <= most:
                decode_steps(model, rows, context)


if __name__ == "__main__":
    main()
