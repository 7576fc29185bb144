"""Attention of decoding rows by their lengths, and compiled decode passes
(trouper/engine/kv/decode_attention.py, compiled_pass.py).

The kernel is for CUDA: here attention over masked buffers takes its place, so what is tested is
everything around it. That the kernel itself computes the same is tested on the device
(tests/device/test_decode_attention.py).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any, cast

import attrs
import mlx.core as mx
import numpy as np
import pytest

from tests.arithmetic import cpu_only
from tests.engine import test_draft_model, test_drafts, test_mtp
from tests.engine.driver import Driver, Request
from tests.engine.test_draft_model import other
from tests.engine.test_exactness import (
    greedy_requests,
    model_of,
    one_half,
    other_half,
    play_randomly,
)
from tests.family_configs import FAMILIES, VOCABULARY
from tests.heads import HEADS
from tests.zoo import vlm_playing
from trouper.engine.kv import (
    compiled_pass,
    decode_attention,
    decode_kernel,
    prefill_attention,
    prefill_kernel,
)
from trouper.engine.kv.compiled_pass import CompiledPasses, TracedPrompt, TracedRegion, Untraceable
from trouper.engine.kv.decode_kernel import Heads, KernelCall
from trouper.engine.kv.model_caches import state_slots
from trouper.engine.kv.prefill_attention import TRIED_WIDTH
from trouper.engine.kv.prefill_kernel import PrefillCall
from trouper.engine.kv.quantized_kv import PLAIN, KvFormat
from trouper.engine.kv.rows import rows_for
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.passes.pass_shapes import EXACT, MAX_KERNEL_WIDTH, ROUNDED, Shapes
from trouper.engine.passes.region import Region
from trouper.engine.step import StepEngine
from trouper.engine.warm_up import warm_up
from trouper.protocol.plans import Admit, Chunk, Plan, RowId
from trouper.protocol.sampling import Sampling

BY_LENGTH = attrs.evolve(ROUNDED, first_bank=8, shared_tokens=32, length_kernel=True)
TRIAL, TRIAL_OF_CHUNKS = decode_attention.computes, prefill_attention.computes
ONE_BANK = attrs.evolve(BY_LENGTH, first_bank=512)
DRAFTED = [
    "llama",
    "gpt_oss",
    "gemma3_text",
    "qwen3_moe",
    "llama4_text",
    "deepseek_v3",
    "qwen3_5",
    "falcon_h1",
]


def masked(heads: Heads, call: KernelCall) -> mx.array:
    """What the kernel computes, in MLX's operations."""
    rows, all_heads, width, dim = call.queries.shape
    tokens = heads.ring or call.keys.shape[2]
    keys, values = (part[:rows, :, :tokens] for part in (call.keys, call.values))
    queries = (call.queries * call.scale).reshape(
        rows, heads.key_heads, -1, dim
    )  # No copies of keys, as in the kernel.
    scores = (queries @ keys.swapaxes(-1, -2)).reshape(rows, all_heads, width, tokens)
    index, last = mx.arange(tokens), call.lengths[:, None, None] - 1
    position = last - (last - index) % heads.ring if heads.ring else index
    query = last - (width - 1 - mx.arange(width)[:, None])
    visible = (position >= 0) & (position <= query) & (position > query - (heads.window or 2**30))
    scores = mx.where(visible[:, None], scores, -float("inf"))
    if call.sinks is not None:
        sunk = mx.broadcast_to(
            call.sinks.astype(scores.dtype)[:, None, None], (rows, all_heads, width, 1)
        )
        scores = mx.concatenate([scores, sunk], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., :tokens].reshape(rows, heads.key_heads, -1, tokens)
    return (weights @ values).reshape(call.queries.shape)


CHUNKS = list[tuple[int, ...]]()
"""Shapes of the queries of each call of the kernel over chunks, in a test."""


def masked_chunks(heads: Heads, call: PrefillCall) -> mx.array:
    """What the kernel over chunks computes, for each row by itself."""
    CHUNKS.append(tuple(call.queries.shape))
    width, capacity = call.queries.shape[2], call.keys.shape[2]
    outputs = []
    for row, (slot, length) in enumerate(np.array(call.rows).tolist()):
        end = length + width
        position, query = np.arange(end), np.arange(length, end)[:, None]
        visible = position <= query
        index = position
        if heads.ring:
            own = call.appended & (position >= length)
            index = np.where(own, position + (capacity - end), position % heads.ring)
            visible &= position > query - heads.window
        assert index.max() < capacity, "each row's buffers have room for the pass"
        keys, values = (
            part[slot : slot + 1][:, :, mx.array(index)] for part in (call.keys, call.values)
        )
        outputs.append(
            mx.fast.scaled_dot_product_attention(
                call.queries[row : row + 1],
                keys,
                values,
                scale=call.scale,
                mask=mx.array(visible),
                sinks=call.sinks,
            )
        )
    return mx.concatenate(outputs)


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the queries of each call."""
    calls = list[tuple[int, ...]]()

    def run(heads: Heads, call: KernelCall) -> mx.array:
        calls.append(tuple(call.queries.shape))
        return masked(heads, call)

    monkeypatch.setattr(decode_kernel, "run", run)
    monkeypatch.setattr(decode_attention, "HEAD_DIMS", range(1, 1000))
    monkeypatch.setattr(decode_attention, "computes", lambda *_: True)
    monkeypatch.setattr(prefill_kernel, "run", masked_chunks)
    CHUNKS.clear()
    monkeypatch.setattr(prefill_attention, "TILES", range(1, 1000))
    monkeypatch.setattr(prefill_attention, "DTYPES", [mx.float32])
    monkeypatch.setattr(prefill_attention, "computes", lambda *_, **__: True)
    return calls


def compiled(engine: StepEngine) -> CompiledPasses:
    assert isinstance(engine._rows, SlotRows)
    return engine._rows._compiled


@one_half
@pytest.mark.long(but=("gpt_oss",))
def test_r1_a_row_says_the_same(name: str) -> None:
    play_randomly(name, greedy_requests(name), 1, BY_LENGTH)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.long(but=("llama",))
def test_r9_passes_of_a_draft_model_too(name: str) -> None:
    assert test_draft_model.play(
        name, greedy_requests(name), "by length", draft=other(), shapes=BY_LENGTH
    ).drafted


@pytest.mark.parametrize("name", [name for name in HEADS if name in FAMILIES])
@pytest.mark.long(but=("deepseek_v3",))
def test_r9_passes_of_an_mtp_head_too(name: str) -> None:
    assert test_mtp.play(name, greedy_requests(name), "by length", shapes=BY_LENGTH).drafted


def two_rows(name: str, shapes: Shapes = BY_LENGTH, **options: Any) -> StepEngine:
    """An engine that has decoded two rows of different lengths together."""
    engine = StepEngine(model_of(name), VOCABULARY, shapes=shapes, **options)
    Driver(engine).play([Request([5, 6, 7], 12), Request([8, 9, 10, 11, 12], 12)])
    return engine


@pytest.mark.parametrize("name", DRAFTED)
@pytest.mark.long(but=("llama", "gpt_oss", "qwen3_5"))
def test_r9_drafts_that_are_verified_too(name: str, kernel: list[tuple[int, ...]]) -> None:
    driver = test_drafts.play(name, greedy_requests(name), f"{name} by length", shapes=BY_LENGTH)
    assert driver.drafted
    widths = {shape[2] for shape in kernel}
    # Padding would enter states, so widths are those of the drafts.
    if state_slots(model_of(name)):
        assert len(widths) > 1
    else:
        assert widths <= {1, 2, 3, 5, 9}


def test_a_pass_that_verifies_drafts_is_compiled() -> None:
    driver = test_drafts.play("llama", greedy_requests("llama"), "compiled", shapes=ONE_BANK)
    passes = compiled(driver.engine)._compiled
    assert {width_of(structure) for structure, each in passes.items() if not each.fault} > {1}


def lone_plan(row: RowId, prompt: Sequence[int]) -> Plan:
    """The plan of a prompt that is alone on the engine."""
    admit = Admit(row, np.array(prompt, "<i4").tobytes(), Sampling(temperature=0.0))
    return Plan(0, admit=(admit,), prefill=(Chunk(row, len(prompt)),))


def lone_prompts(engine: StepEngine, *prompts: Sequence[int]) -> list[list[int]]:
    """The first tokens after each prompt, alone on the engine: what its pass gives, and what
    follows from the KV that it leaves."""
    found = []
    for number, prompt in enumerate(prompts):
        row = RowId(number)
        plans = [lone_plan(row, prompt), *[Plan(0, decode=(row,))] * 3]
        found.append(
            [token for plan in plans for token in engine.collect(engine.launch(plan)).tokens]
        )
        engine.collect(engine.launch(Plan(0, drop=(row,))))
    return found


PROMPTS = [range(3, 3 + length) for length in (20, 33, 31, 40, 7, 2, 64, 32, 31)]


@other_half
@pytest.mark.long(but=("deepseek_v3",))
def test_r1_a_lone_prompt_has_the_same_first_token_when_its_pass_is_compiled(name: str) -> None:
    engine = StepEngine(model_of(name), VOCABULARY, shapes=ONE_BANK)
    assert lone_prompts(engine, *PROMPTS) == lone_prompts(
        StepEngine(model_of(name), VOCABULARY), *PROMPTS
    )


def test_passes_over_lone_prompts_are_compiled_by_width() -> None:
    engine = StepEngine(model_of("llama"), VOCABULARY, shapes=ONE_BANK)
    lone_prompts(engine, *PROMPTS)
    passes = {
        kind: each for kind, each in compiled(engine)._compiled.items() if is_of_prompts(kind)
    }
    assert sorted(width_of(kind) for kind in passes) == [32, 64]
    assert [each.fault for each in passes.values()] == ["", ""]


def test_a_lone_prompt_is_written_into_its_own_slot() -> None:
    """Another row may have a slot, and nothing in it yet."""
    rows, _ = rows_for(model_of("llama"), PLAIN, shapes=ONE_BANK)
    assert isinstance(rows, SlotRows)
    prompt, written = [5, 6, 7, 8], list[list[mx.array]]()
    for row in [RowId(1), RowId(1), RowId(0), RowId(0), RowId(1)]:
        for opened in (RowId(0), RowId(1)):
            rows.open(opened, len(prompt))
        mx.eval(rows.first(row, prompt))
        written.append([mx.contiguous(part) for part in rows.copies.read(row, 0, len(prompt))])
        rows.drop([RowId(0), RowId(1)])
    kinds = [kind for kind in rows._compiled._compiled if is_of_prompts(kind)]
    assert len(kinds) == 2, "of either slot"
    for parts in written[1:]:
        assert all(
            mx.array_equal(part, first) for part, first in zip(parts, written[0], strict=True)
        )


def test_a_lone_prompt_beside_kv_of_a_row_that_waits_keeps_it() -> None:
    rows, _ = rows_for(model_of("llama"), PLAIN, shapes=ONE_BANK)
    assert isinstance(rows, SlotRows)
    for row in (RowId(0), RowId(1)):
        rows.open(row, 5)
    mx.eval(rows.prefill({RowId(0): [5, 6, 7, 8]}) or [])
    before = [mx.contiguous(part) for part in rows.copies.read(RowId(0), 0, 4)]
    for _ in range(3):
        mx.eval(rows.first(RowId(1), [5, 6, 7, 8]))
        rows.drop([RowId(1)])
        rows.open(RowId(1), 5)
    after = rows.copies.read(RowId(0), 0, 4)
    assert all(mx.array_equal(*parts) for parts in zip(before, after, strict=True))
    assert not any(map(is_of_prompts, rows._compiled._compiled))


def test_a_prompt_beside_buffers_is_not_compiled() -> None:
    """Its row reads a cached prefix, or others decode."""
    engine = StepEngine(model_of("llama"), VOCABULARY, shapes=ONE_BANK)
    Driver(engine).play(
        [Request([5, 6, 7], 12), Request([8, 9, 10, 11, 12], 12), Request([8, 9, 10, 11, 12], 12)]
    )
    assert not any(map(is_of_prompts, compiled(engine)._compiled))


@pytest.mark.parametrize(
    ("name", "shapes"), [("llama", ONE_BANK), ("llama", ROUNDED), ("qwen3_next", ONE_BANK)]
)
def test_the_first_two_passes_of_a_kind_are_said_to_prepare(name: str, shapes: Shapes) -> None:
    """Also those that are never compiled: attention with masks, recurrent states."""
    engine = StepEngine(model_of(name), VOCABULARY, shapes=shapes)
    row = RowId(0)
    first = Admit(row, np.arange(1, 6, dtype="<i4").tobytes(), Sampling(temperature=0.0))
    engine.collect(engine.launch(Plan(0, admit=(first,), prefill=(Chunk(row, 5),))))
    said = [
        engine.collect(engine.launch(Plan(step, decode=(row,)))).preparing for step in range(1, 5)
    ]
    # A lone prompt has a pass of its own, which is of another kind.
    assert said == [True, True, False, False]


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_pass_of_a_row_alone_is_said_to_prepare_by_its_own_kind(name: str) -> None:
    """It was said of it what was true of the decode pass before."""
    engine = StepEngine(model_of(name), VOCABULARY, shapes=ONE_BANK)
    steps = iter(range(20))

    def alone(row: int) -> bool:
        prompt = np.arange(1, 6, dtype="<i4").tobytes()
        admit = Admit(RowId(row), prompt, Sampling(temperature=0.0))
        dropped = (RowId(row - 1),) if row else ()
        plan = Plan(next(steps), drop=dropped, admit=(admit,), prefill=(Chunk(RowId(row), 5),))
        return engine.collect(engine.launch(plan)).preparing

    assert [alone(row) for row in range(3)] == [True, True, False]
    assert engine.collect(engine.launch(Plan(next(steps), decode=(RowId(2),)))).preparing
    assert not alone(3)
    assert not engine.collect(engine.launch(Plan(next(steps), drop=(RowId(3),)))).preparing


@cpu_only
def test_a_device_that_prepares_nothing_never_says_so() -> None:
    engine, row = StepEngine(model_of("llama"), VOCABULARY), RowId(0)
    admit = Admit(row, np.arange(1, 6, dtype="<i4").tobytes(), Sampling(temperature=0.0))
    plans = [
        Plan(0, admit=(admit,), prefill=(Chunk(row, 5),)),
        *(Plan(step, decode=(row,)) for step in range(1, 4)),
    ]
    assert not any(engine.collect(engine.launch(plan)).preparing for plan in plans)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3_text"])
def test_rings_are_read_by_their_lengths(name: str, kernel: list[tuple[int, ...]]) -> None:
    passes = compiled(two_rows(name, shapes=ONE_BANK))._compiled
    assert [compiled.fault for compiled in passes.values()] == [""]
    assert len(kernel) == 2 * len(model_of(name).layers)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "llama4_text"])
def test_a_pass_is_built_twice_and_then_instantiated(
    name: str, kernel: list[tuple[int, ...]]
) -> None:
    passes = compiled(two_rows(name, shapes=ONE_BANK))._compiled
    assert [compiled.fault for compiled in passes.values()] == [""]
    assert len(kernel) == 2 * len(model_of(name).layers), "once as usual, and once to trace it"


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_a_pass_that_depends_on_lengths_is_not_compiled_and_says_why(name: str) -> None:
    """Rings that verify drafts: which of their tokens are padding depends on the row."""
    driver = test_drafts.play(name, greedy_requests(name), f"{name} rings", shapes=ONE_BANK)
    passes = compiled(driver.engine)
    faults = {each.fault for structure, each in passes._compiled.items() if width_of(structure) > 1}
    assert faults == {passes.fault} and "reads" in passes.fault


def test_models_with_recurrent_state_are_not_compiled(kernel: list[tuple[int, ...]]) -> None:
    assert not compiled(two_rows("qwen3_next"))._compiled
    assert kernel, "their attention is by lengths"


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_models_that_compute_with_keys_get_arrays(name: str, kernel: list[tuple[int, ...]]) -> None:
    two_rows(name)
    assert not kernel


def test_quantized_kv_is_read_as_before(kernel: list[tuple[int, ...]]) -> None:
    two_rows("llama", kv=KvFormat(8, 32))
    assert not kernel


def test_a_bounded_number_of_structures_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_pass, "MAX_COMPILED", 2)
    engine = StepEngine(model_of("llama"), VOCABULARY, shapes=ONE_BANK)
    Driver(engine).play([Request([5, 6, 7], 4 * (rows + 1)) for rows in range(4)])
    assert rows_of_structures(engine) == [2, 1]


def width_of(structure: Any) -> int:
    """Number of tokens of each row in a pass of one bank."""
    return cast(int, structure[1])


def is_of_prompts(structure: Any) -> bool:
    return cast(tuple[Any, ...], structure)[0] == "prompt"


def rows_of_structures(engine: StepEngine) -> list[int]:
    """Number of rows in the first bank of each compiled structure."""
    return [cast(tuple[int, ...], structure)[0] for structure in compiled(engine)._compiled]


def test_buffers_that_have_grown_are_another_structure() -> None:
    engine = StepEngine(model_of("llama"), VOCABULARY, shapes=ONE_BANK)
    Driver(engine).play([Request([5] * 150, 60), Request([8, 9, 10], 60)])
    assert rows_of_structures(engine).count(2) == 2, (
        "buffers of 248 tokens grow 64 before they are full"
    )


class TestBuffers:
    """An old buffer that somebody holds makes each write copy a buffer."""

    def rows(self) -> SlotRows:
        rows, _ = rows_for(model_of("llama"), PLAIN, shapes=ONE_BANK)
        assert isinstance(rows, SlotRows)
        for row, length in ((RowId(0), 400), (RowId(1), 300)):
            rows.open(row, length + 1)
            mx.eval(rows.prefill({row: [5] * length}) or [])
            rows.promote(row)
        for _ in range(3):
            mx.eval(rows.decode(mx.array([1, 2])))
        return rows

    def test_a_compiled_pass_writes_in_place(self) -> None:
        rows = self.rows()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(rows.decode(mx.array([1, 2])))
        assert len(rows._compiled._compiled) == 1
        assert mx.get_peak_memory() - before < rows.nbytes / 4, (
            "less than one of the buffers of two layers"
        )

    def test_chunks_are_written_in_place(self) -> None:
        rows, chunks = self.rows(), {RowId(2): [5] * 8, RowId(3): [5] * 7}
        for row in chunks:
            rows.open(row, 400)
        mx.eval(rows.prefill(chunks) or [])
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(rows.prefill(chunks) or [])
        assert CHUNKS[-1][:3] == (2, 4, 8), "of two rows, by lengths"
        assert mx.get_peak_memory() - before < rows.nbytes / 4

    def test_nothing_keeps_the_rows(self) -> None:
        rows = self.rows()
        gone = weakref.ref(rows)
        one = weakref.ref(next(iter(rows._compiled._compiled.values())))
        gc.disable()
        try:
            del rows
            assert gone() is None and one() is None
        finally:
            gc.enable()


class TestTrial:
    """The kernel is tried with the model's heads before it is used."""

    @pytest.fixture(autouse=True)
    def tried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        TRIAL.cache_clear()
        monkeypatch.setattr(decode_attention, "computes", TRIAL)

    def test_one_that_is_right_is_used(self, kernel: list[tuple[int, ...]]) -> None:
        two_rows("llama", shapes=ONE_BANK)
        assert kernel[0][0] == len(decode_attention.TRIED_LENGTHS) and len(kernel) > 1

    def test_one_over_chunks_that_is_wrong_is_not_used(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        TRIAL_OF_CHUNKS.cache_clear()
        monkeypatch.setattr(prefill_attention, "computes", TRIAL_OF_CHUNKS)
        monkeypatch.setattr(prefill_kernel, "run", lambda *call: masked_chunks(*call) * 1.2)
        play_randomly("llama", greedy_requests("llama"), 2, BY_LENGTH)
        assert len(CHUNKS) == 1
        assert "over chunks" in caplog.text and "wrong" in caplog.text
        CHUNKS.clear()
        monkeypatch.setattr(prefill_kernel, "run", masked_chunks)
        TRIAL_OF_CHUNKS.cache_clear()
        assert TRIAL_OF_CHUNKS(Heads(mx.float32, 64, 1, 1, 20, 30), appended=False)
        assert TRIAL_OF_CHUNKS(Heads(mx.float32, 64, 1, 1, 20, 30, sinks=True), appended=True)
        assert {shape[2] for shape in CHUNKS} == {11, TRIED_WIDTH}

    @pytest.mark.parametrize("fault", ["wrong", "refused"])
    def test_one_that_is_not_costs_nothing_but_time(
        self, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def faulty(heads: Heads, call: KernelCall) -> mx.array:
            if fault == "refused":
                raise RuntimeError("too many resources requested for launch")
            return masked(heads, call) * 1.2

        monkeypatch.setattr(decode_kernel, "run", faulty)
        play_randomly("llama", greedy_requests("llama"), 2, BY_LENGTH)
        said = [
            record.getMessage()
            for record in caplog.records
            if record.name == decode_attention.__name__
        ]
        assert len(said) == 1 and ("wrong" if fault == "wrong" else "too many resources") in said[0]


def test_what_a_traced_region_does_not_have_has_a_name() -> None:
    traced = Region(0, np.array([3, 4], np.int32), np.ones(2, np.int32), 1, BY_LENGTH)
    region = TracedRegion(traced, {"offset": mx.array([3, 4])})
    assert region.offset.tolist() == [3, 4]
    for attribute in ("lengths", "counts", "longest", "keys", "positions"):
        with pytest.raises(Untraceable, match="reads"):
            getattr(region, attribute)
    with pytest.raises(Untraceable):
        region.flat_indices(2, 256)


def test_what_differs_between_prompts_is_not_in_a_traced_region() -> None:
    traced = Region(0, np.zeros(1, np.int32), np.array([3], np.int32), 32, BY_LENGTH)
    region = TracedPrompt(traced)
    assert region.causal and region.keys == 32 and region.positions.shape == (1, 32)
    for attribute in ("counts", "last", "clamped_positions"):
        with pytest.raises(Untraceable, match="reads"):
            getattr(region, attribute)


def test_the_warm_up_compiles_passes_over_lone_prompts() -> None:
    engine = StepEngine(model_of("llama"), VOCABULARY, shapes=ONE_BANK)
    warm_up(engine, VOCABULARY, 100, 0)
    assert {width_of(kind) for kind in compiled(engine)._compiled if is_of_prompts(kind)} == {
        32,
        64,
        96,
    }


def test_the_warm_up_knows_whole_buffers() -> None:
    engine = StepEngine(model_of("llama"), VOCABULARY, shapes=ONE_BANK)
    warm_up(engine, VOCABULARY, 4096, 512)
    assert 1 in rows_of_structures(engine), "a row alone is prepared, too"


@pytest.mark.parametrize("shapes", [ONE_BANK, ROUNDED])
def test_nothing_is_planned_for_rows_that_a_kernel_reads(shapes: Shapes) -> None:
    """A hundred plans of cuDNN, of 40 ms each, held up the first requests."""
    engine = StepEngine(model_of("llama"), VOCABULARY, shapes=shapes)
    assert warm_up(engine, VOCABULARY, 4096).run_next() == (shapes is ROUNDED)


def test_which_passes_are_by_length() -> None:
    def by_length(width: int, *lengths: int, start: int = 0, singly: bool = True) -> bool:
        counts = np.ones(len(lengths), np.int32)
        return Region(
            start, np.array(lengths, np.int32), counts, width, BY_LENGTH, singly=singly
        ).by_length

    assert (
        by_length(1, 5) and by_length(1, 5000) and by_length(1, 5000, 3000) and by_length(9, 5, 7)
    )
    assert not by_length(9, 5, singly=False), "a chunk of a prompt"
    assert not by_length(MAX_KERNEL_WIDTH + 1, 5)
    assert not by_length(1, 5, start=1)


def test_which_chunks_have_attention_by_lengths() -> None:
    def region(width: int, *lengths: int) -> Region:
        counts = np.full(len(lengths), width, np.int32)
        return Region(3, np.array(lengths, np.int32), counts, width, BY_LENGTH)

    def tiled(width: int, *lengths: int) -> bool:
        return region(width, *lengths).tiled

    assert tiled(8, 0) and tiled(64, 0, 5, 300) and tiled(512, 1024), "no plan, no mask"
    assert tiled(1256, 2048) and tiled(512, 9001), "the rest of a prompt, a chunk behind a hit"
    assert tiled(512, 4096, 4096), "a plan for each number of rows"
    for chunk in (region(2048, 0), region(512, 4096), region(512, 8192)):
        assert not chunk.tiled and chunk.causal, "long chunks of a row alone have plans"
    assert not tiled(2000, 50_000), "half as fast as cuDNN, which takes longer than a plan"
    assert not tiled(1, 5)
    assert not Region(0, np.zeros(1, np.int32), np.full(1, 8, np.int32), 8, ROUNDED).tiled


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_next"])
def test_chunks_of_several_prompts_share_attention_by_lengths(name: str) -> None:
    two_rows(name, shapes=ONE_BANK)
    together = [shape for shape in CHUNKS if shape[0] == 2]
    assert CHUNKS and bool(together) == (name != "qwen3_next"), "states absorb padding"


@pytest.mark.parametrize("name", ["paddleocr_vl", "ernie4_5_moe_vl"])
def test_models_of_mlx_vlm_get_masks_as_arrays_and_lengths_without_waiting(name: str) -> None:
    """PaddleOCR-VL cuts masks to the keys that it gets; ERNIE reads its rows' length."""
    model, _ = vlm_playing.build(name)
    requests = [Request([5, 6, 7], 6), Request([8, 9, 10, 11, 12], 6)]
    plain, engine = (StepEngine(model, VOCABULARY, shapes=shapes) for shapes in (EXACT, ONE_BANK))
    expected = [row.tokens for row in Driver(plain).play(requests)]
    assert [row.tokens for row in Driver(engine).play(requests)] == expected
    assert bool(CHUNKS) == (name == "ernie4_5_moe_vl")
    assert not any("eval" in each.fault for each in compiled(engine)._compiled.values())


def test_quantized_kv_is_read_by_lengths_where_it_is_dequantized() -> None:
    two_rows("llama", shapes=ONE_BANK, kv=KvFormat(8, 32))
    assert CHUNKS


@pytest.mark.parametrize(
    ("tokens", "width"),
    [(1, 1), (2, 2), (3, 3), (4, 5), (5, 5), (6, 9), (17, 17), (18, 33), (33, 33), (34, 40)],
)
def test_widths_of_passes_with_drafts_are_on_a_ladder(tokens: int, width: int) -> None:
    assert BY_LENGTH.drafted_width(tokens) == width
