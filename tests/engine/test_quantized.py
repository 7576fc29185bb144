"""KV in 8 bits: other numbers than the model's own, but the same ones in any company, chunks and
after any way back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from tests.arithmetic import CLOSE, TF32
from tests.engine.driver import Driver, Orders, Request, Row
from tests.engine.test_blocks import AHEAD, WHOLE, restore, sizes
from tests.families import FAMILIES, build, prompts
from tests.family_configs import ONE_HALF, OTHER_HALF, VOCABULARY, wide
from trouper.engine.kv import model_caches
from trouper.engine.kv.kv_layout import kv_layout, layout_of
from trouper.engine.kv.model_caches import slot_caches
from trouper.engine.kv.quantized_kv import PLAIN, KvFormat, QuantizedSlots, dequantized
from trouper.engine.kv.rows import rows_for
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.step import StepEngine
from trouper.protocol.plans import BlockId, Load, RowId, Store

EIGHT = KvFormat(8, 32)
CHUNK, TOKENS = 32, 12
PROMPTS = prompts()
LONG = PROMPTS[4]
NO_KV = ("mamba2", "rwkv7", "recurrent_gemma")
"""Nothing to quantize: states, and rings."""
QUANTIZED = [name for name in FAMILIES if name not in NO_KV]
every_quantized = pytest.mark.parametrize("name", QUANTIZED)
one_half = pytest.mark.parametrize("name", [name for name in QUANTIZED if name in ONE_HALF])
other_half = pytest.mark.parametrize("name", [name for name in QUANTIZED if name in OTHER_HALF])
GAP = 0.2 if TF32 else 0.05
"""A value that rounding moves over the edge of its step moves log-probabilities by this at most, so
closer tokens may change places. What a wrong row would say is far beyond it."""


@cache
def model_of(name: str) -> nn.Module:
    return build(name, config=wide(FAMILIES[name]))


def engine_of(name: str) -> StepEngine:
    return StepEngine(model_of(name), VOCABULARY, EIGHT)


@cache
def alone(name: str) -> list[Row]:
    driver = Driver(engine_of(name), CHUNK)
    return [driver.play([Request(prompt, TOKENS, logprobs=2)])[0] for prompt in PROMPTS]


def agreed(row: Row, wanted: Row) -> int:
    """How many tokens are the same, up to one that may be another."""
    skipped = len(wanted.tokens) - len(row.tokens) if row.request.leave is None else 0
    for place, (mine, theirs) in enumerate(
        zip(row.logprobs, wanted.logprobs[skipped:], strict=False)
    ):
        (_, first), (_, second) = theirs.top
        if first - second < GAP and mine.token != theirs.token:
            return place
        assert mine.token == theirs.token, (place, mine, theirs)
        assert abs(mine.logprob - theirs.logprob) < GAP
    return len(row.logprobs)


def agree(rows: Sequence[Row], wanted: Sequence[Row]) -> None:
    same = sum(agreed(row, other) for row, other in zip(rows, wanted, strict=True))
    assert same > (0.5 if TF32 else 0.7) * sum(len(row.tokens) for row in rows), (
        "too little was compared"
    )


class TestEightBits:
    @one_half
    def test_r1_r3_together_joining_and_leaving(self, name: str) -> None:
        requests = [Request(prompt, TOKENS, logprobs=2) for prompt in PROMPTS]
        agree(Driver(engine_of(name), CHUNK).play(requests), alone(name))
        joins, leaves = (4, 0, 7, 2, 0, 5), (None, 6, None, None, None, 9)
        requests = [
            Request(prompt, TOKENS, join=join, leave=leave, logprobs=2)
            for prompt, join, leave in zip(PROMPTS, joins, leaves, strict=True)
        ]
        agree(
            Driver(engine_of(name), lambda step: (50, 7, 32)[step % 3]).play(requests), alone(name)
        )

    @other_half
    def test_d10_stored_and_restored(self, name: str) -> None:
        """From blocks, from a live row beyond them, and through bytes into another engine."""
        order = Store(
            RowId(0),
            0,
            sizes(WHOLE),
            tuple(map(BlockId, range(len(sizes(WHOLE))))),
            self.snapshot(name),
        )
        kept = [*order.blocks, *([] if order.snapshot is None else [order.snapshot])]
        known = alone(name)[4]
        prompt, step = [*LONG, *known.tokens[: AHEAD + 1]], 4 + AHEAD
        rest = TOKENS + len(LONG) - len(prompt)
        orders: Orders = {step: {"store": (order,), "persist": tuple(kept)}}
        first, *others = [
            Request(LONG, TOKENS, logprobs=2),
            Request(prompt, rest, join=step, logprobs=2, restore=restore(order, WHOLE)),
            Request(
                prompt,
                rest,
                join=step,
                logprobs=2,
                restore=restore(order, WHOLE, blocks=2, source=0),
            ),
        ]
        driver = Driver(engine_of(name), CHUNK, orders)
        agree(driver.play([first, *others]), [known] * 3)
        loads = tuple(
            Load(block, payload) for block, payload in zip(kept, driver.persisted, strict=True)
        )
        again = Driver(engine_of(name), CHUNK, {0: {"load": loads}})
        later = Request(prompt, rest, logprobs=2, restore=restore(order, WHOLE))
        agree(again.play([later, Request(PROMPTS[1], TOKENS, logprobs=2)]), [known, alone(name)[1]])

    def snapshot(self, name: str) -> BlockId | None:
        return BlockId(900) if layout_of(model_of(name), EIGHT).snapshot_bytes else None

    @every_quantized
    def test_something_of_it_is_quantized(self, name: str) -> None:
        plain, eight = (layout_of(model_of(name), kv) for kv in (PLAIN, EIGHT))
        assert any(shape.dtype == mx.uint32 for shape in eight.sliceable)
        assert eight.token_bytes < 0.7 * plain.token_bytes
        assert eight.snapshot_bytes == plain.snapshot_bytes
        assert "8 bits in groups of 32" in kv_layout(model_of(name), EIGHT).description

    @every_quantized
    def test_what_attention_reads_of_it_dequantized_counts(self, name: str) -> None:
        """A layer at a time."""
        layers = layout_of(model_of(name), PLAIN).full
        read = [
            sum(shape.nbytes for shape in layer if EIGHT.takes(shape.dims[2])) for layer in layers
        ]
        assert kv_layout(model_of(name), EIGHT).dequantized_token_bytes == max(read) > 0
        assert kv_layout(model_of(name), PLAIN).dequantized_token_bytes == 0


class Written(QuantizedSlots):
    """Remembers what it was given and what it wrote of it: for each position of one row (values,
    codes, scales)."""

    passes: ClassVar[list[Written]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[tuple[mx.array, list[mx.array]]] = []
        Written.passes.append(self)

    def _quantized(self, side: mx.array) -> list[mx.array]:
        parts = super()._quantized(side)
        if len(parts) > 1:
            self.seen.append((side, parts))
        return parts


def written(name: str, tokens: Sequence[int], pieces: Sequence[int]) -> tuple[list[list[Any]], Any]:
    """One row that takes its tokens in pieces: of each position what every layer wrote there, first
    layers first; and its log-probabilities (tokens, vocabulary)."""
    Written.passes = []
    rows, _ = rows_for(model_of(name), EIGHT)
    assert isinstance(rows, SlotRows)
    assert rows.copies.layout.full, "made before, by a pass that does not count"
    with patch.object(model_caches, "QuantizedSlots", Written):
        rows.open(RowId(0))
    said, at = [], 0
    for piece in pieces:
        logits = rows.score(RowId(0), tokens[at : at + piece])
        said.append(np.array(logits - mx.logsumexp(logits, -1, keepdims=True)))
        at += piece
    places: list[list[Any]] = [[] for _ in tokens]
    for layer in Written.passes:
        sides = max(1, len(layer.seen) // len(pieces))
        for side in range(sides):
            whole = [
                np.concatenate([np.array(part)[0] for part in parts], 1)
                for parts in zip(
                    *([values, *wrote] for values, wrote in layer.seen[side::sides]), strict=True
                )
            ]
            for place, each in enumerate(places):
                each.append([part[:, place] for part in whole])
    return places, np.concatenate(said)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
@pytest.mark.long(but=("llama",))
def test_only_rounding_moves_a_code_and_before_it_nothing_differs(name: str) -> None:
    """Tokens one by one, and all in one pass. Before a value was written as another code than in
    the other way, all log-probabilities are as near as without quantization; and the first such
    value was the same but for rounding."""
    for seed in range(4):
        [tokens] = prompts((60,), seed)
        one, said = written(name, tokens, [1] * len(tokens))
        all_at_once, wanted = written(name, tokens, [len(tokens)])
        for place, (mine, theirs) in enumerate(zip(one, all_at_once, strict=True)):
            differ = [
                np.abs(values - others).max()
                for (values, codes, *_), (others, their_codes, *_) in zip(mine, theirs, strict=True)
                if not np.array_equal(codes, their_codes)
            ]
            if differ:
                assert differ[0] < (1e-2 if TF32 else 2e-5)
                break
            assert np.abs(said[place] - wanted[place]).max() < CLOSE


def test_the_comparison_can_fail() -> None:
    with pytest.raises(AssertionError):
        agree(alone("llama"), alone("llama")[::-1])
    plain = Driver(StepEngine(model_of("llama"), VOCABULARY), CHUNK).play(
        [Request(LONG, TOKENS, logprobs=2)]
    )
    assert plain[0].logprobs != alone("llama")[4].logprobs


def test_heads_that_groups_do_not_divide_stay_as_they_are() -> None:
    narrow = build("llama")
    assert layout_of(narrow, KvFormat(8, 64)) == layout_of(narrow, PLAIN)
    assert "not quantized" in kv_layout(narrow, KvFormat(8, 64)).description
    assert "but for 3 of 6 buffers" in kv_layout(model_of("deepseek_v3"), EIGHT).description
    requests = [Request(prompt, TOKENS) for prompt in PROMPTS]
    tokens = [
        [row.tokens for row in Driver(StepEngine(narrow, VOCABULARY, kv)).play(requests)]
        for kv in (PLAIN, KvFormat(8, 64))
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    ("dim", "kv"), [(64, KvFormat(8, 64)), (128, KvFormat(8, 32)), (128, KvFormat(4, 64))]
)
def test_dequantized_is_what_mlx_says(dim: int, kv: KvFormat, dtype: mx.Dtype) -> None:
    mx.random.seed(3)
    parts = mx.quantize(mx.random.normal((3, 2, 50, dim)).astype(dtype), kv.group_size, kv.bits)
    packed, scales, biases = (part[1:, :, :40] for part in parts)
    wanted = mx.dequantize(packed, scales, biases, kv.group_size, kv.bits)
    got = dequantized(packed, scales, biases, kv)
    assert got.dtype == dtype and mx.array_equal(got, wanted)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_a_token_weighs(bits: int) -> None:
    """Bits, and a scale and a bias of the model's type for each group."""
    model = model_of("llama")
    values = sum(int(np.prod(shape.dims)) for shape in layout_of(model, PLAIN).sliceable)
    assert (
        layout_of(model, KvFormat(bits, 32)).token_bytes
        == values * bits // 8 + 2 * values // 32 * 4
    )


def test_no_bits_are_plain_slots() -> None:
    plain = slot_caches(model_of("llama"), KvFormat(0, 64))
    assert type(plain[0]) is type(slot_caches(model_of("llama"), PLAIN)[0])
