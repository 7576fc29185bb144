"""Banks of rows: which row has which bank, what they hold, and what the seam into mlx-lm's
attention relies on.

That tokens do not depend on banks is shown by the tests of exactness, drafts, quantized KV and
blocks."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import base

from tests.engine.driver import GREEDY, Driver, Request
from tests.engine.test_exactness import SMALL_BANKS, model_of
from tests.families import FAMILIES, build
from tests.family_configs import OF_EACH_KIND, VOCABULARY
from trouper.engine.kv import attention_seam
from trouper.engine.kv.attention_seam import JoinedSlots, Parts
from trouper.engine.kv.banks import Banks
from trouper.engine.kv.full_slots import FullSlots
from trouper.engine.kv.kv_layout import Layout, kv_layout
from trouper.engine.kv.model_caches import guess_batching
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.kv.rows import Rows, rows_for
from trouper.engine.kv.slot_buffers import SlotBuffers
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.passes.pass_shapes import EXACT, LEAD, NO_CUDNN, ROUNDED, Shapes
from trouper.engine.passes.region import Region
from trouper.engine.spec_decode.prompt_lookup import DRAFTING
from trouper.engine.step import StepEngine
from trouper.protocol.kv import KvLayout
from trouper.protocol.plans import NO_ROW, RowId

COMPUTE_WITH_KEYS = {"deepseek_v3", "gemma2", "kimi_k25", "kimi_linear"}
"""Families whose models compute with the keys that a cache returns."""


class TestLadder:
    @given(st.integers(0, 2**20), st.sampled_from([1, 8, 512]))
    def test_a_level_holds_its_rows_and_no_shorter_ones(self, tokens: int, first: int) -> None:
        shapes = attrs.evolve(EXACT, first_bank=first)
        level = shapes.level(tokens)
        assert tokens <= shapes.bank_tokens(level)
        assert not level or 16 * tokens > 15 * shapes.bank_tokens(level - 1)

    @given(st.integers(1, 2**20))
    def test_capacity_is_little_more_than_the_longest_row(self, tokens: int) -> None:
        assert tokens <= EXACT.capacity(tokens) < tokens + 256
        assert tokens <= ROUNDED.capacity(tokens) < 1.25 * tokens + 256

    @given(st.integers(1, 200_000), st.integers(2, 64), st.sampled_from([EXACT, ROUNDED]))
    def test_rows_count_the_layers_whose_buffers_have_grown_already(
        self, tokens: int, layers: int, shapes: Shapes
    ) -> None:
        kv = KvLayout(token_bytes=1, lead_tokens=LEAD + NO_CUDNN if shapes.rounded else 0)
        buffers = SlotBuffers(
            [FullSlots() for _ in range(layers)], lambda: Layout((), (), ()), shapes
        )
        assert sum(cache._capacity(tokens) for cache in buffers.leaves) <= layers * kv.row_bytes(
            tokens
        )

    @pytest.mark.parametrize("name", ["gpt_oss", "gemma3_text"])
    def test_rows_count_the_tokens_that_rings_hold_beyond_their_window(self, name: str) -> None:
        """Drafts that are rejected have overwritten the oldest tokens: three times as many are held
        as a step may draft."""
        model = model_of(name)
        rows, _ = rows_for(model, PLAIN, DRAFTING.slack)
        assert isinstance(rows, SlotRows)
        rows.open(RowId(1), 40)
        rows.prefill({RowId(1): [*range(1, 40)]})
        kv, rings = (
            kv_layout(model, PLAIN, draft_tokens=DRAFTING.tokens),
            rows._banks[RowId(1)].buffers._rings,
        )
        assert sum(ring.nbytes for ring in rings) == kv.snapshot_bytes + kv.ring_slack_bytes
        assert kv.snapshot_bytes == kv_layout(model, PLAIN).snapshot_bytes


class TestRowsInBanks:
    @pytest.fixture
    def rows(self) -> SlotRows:
        rows, found = rows_for(model_of("llama"), PLAIN, shapes=SMALL_BANKS)
        assert isinstance(rows, SlotRows) and found.allows("banks")
        return rows

    def levels(self, rows: SlotRows) -> dict[int, list[RowId]]:
        banks = rows._banks
        assert isinstance(banks, Banks)
        return {bank.key.level: list(bank.slots.order) for bank in banks}

    def decoding(self, rows: SlotRows, lengths: list[int]) -> None:
        for number, length in enumerate(lengths):
            rows.open(RowId(number), length + 1)
            rows.prefill({RowId(number): list(range(1, length + 1))})
            rows.promote(RowId(number))

    def test_a_row_begins_where_its_prompt_ends(self, rows: SlotRows) -> None:
        self.decoding(rows, [29, 3, 12, 4])
        assert self.levels(rows) == {2: [0], 1: [2], 0: [1, 3]}
        assert list(rows.decoding) == [0, 2, 1, 3], "a new short row changes nobody's index"

    def test_a_row_that_outgrows_its_bank_moves(self, rows: SlotRows) -> None:
        self.decoding(rows, [6, 3])
        moved = []
        for _ in range(9):
            rows.move_outgrown()
            moved.append(self.levels(rows))
            mx.eval(rows.decode(mx.array([1, 2])))
        assert moved[0] == {0: [0, 1]} and moved[1] == {1: [0], 0: [1]} and moved[-1] == {1: [0, 1]}
        assert rows.lengths() == {0: 15, 1: 12}

    def test_rows_move_one_a_step_while_there_is_room(self, rows: SlotRows) -> None:
        self.decoding(rows, [3, 14, 14, 15])
        assert self.levels(rows) == {2: [3], 1: [1, 2], 0: [0]}
        moved = []
        for _ in range(3):
            rows.move_outgrown()
            moved.append(self.levels(rows)[2])
            mx.eval(rows.decode(mx.array([1, 2, 3, 4])))
        assert moved == [[3], [3, 1], [3, 1, 2]], (
            "a sixteenth token would belong to the next bank, a 17th would not fit"
        )
        assert rows.lengths() == {0: 6, 1: 17, 2: 17, 3: 18}

    def test_rows_for_which_there_is_no_room_move_at_once(self, rows: SlotRows) -> None:
        self.decoding(rows, [3, 14, 14, 8])
        assert list(rows.decoding) == [1, 2, 3, 0]
        rows.accepted(np.array([3, 3, 0, 0], np.int32))
        rows.move_outgrown()
        assert self.levels(rows) == {2: [1, 2], 1: [3], 0: [0]}

    def test_a_bank_whose_rows_all_outgrow_it_becomes_the_next_one(self, rows: SlotRows) -> None:
        self.decoding(rows, [14, 14, 3])
        before = rows._banks[RowId(0)].buffers
        mx.eval(rows.decode(mx.array([1, 2, 3])))
        rows.move_outgrown()
        assert self.levels(rows) == {2: [0, 1], 0: [2]}
        assert rows._banks[RowId(0)].buffers is before is rows._banks[RowId(1)].buffers, (
            "nothing was copied"
        )
        mx.eval(rows.decode(mx.array([1, 2, 3])))
        assert rows.lengths() == {0: 16, 1: 16, 2: 5}

    def test_long_rows_have_banks_of_their_own(self, rows: SlotRows) -> None:
        """So each takes memory for its own length, and none needs a mask."""
        self.decoding(rows, [29, 28, 50, 30, 3])
        keys = [bank.key for bank in rows._banks]
        assert keys == [(3, 3), (3, 2), (2, NO_ROW), (0, NO_ROW)]
        mx.eval(rows.decode(mx.array([1, 2, 3, 4, 5])))
        rows.move_outgrown()
        assert [bank.key for bank in rows._banks] == [
            (3, 3),
            (3, 2),
            (3, 0),
            (2, NO_ROW),
            (0, NO_ROW),
        ]
        assert rows.lengths() == {0: 30, 1: 29, 2: 51, 3: 31, 4: 4}
        assert [(bank.max_tokens, bank.rows, bank.slots) for bank in rows.bank_stats()] == [
            (8, 1, 1),
            (32, 1, 1),
            (64, 3, 3),
        ]

    def test_a_bank_is_freed_with_its_last_row(self, rows: SlotRows) -> None:
        self.decoding(rows, [30, 3])
        before = rows.nbytes
        rows.drop([RowId(0)])
        assert self.levels(rows) == {0: [1]} and rows.nbytes < before
        rows.drop([RowId(1)])
        assert rows.nbytes == 0 and not list(rows.order)

    def test_what_is_reported_of_banks_is_what_there_is(self, rows: SlotRows) -> None:
        assert rows.bank_stats() == ()
        self.decoding(rows, [29, 3, 12, 4])
        short, middle, long = rows.bank_stats()
        assert [bank.max_tokens for bank in (short, middle, long)] == [8, 16, 32]
        assert [bank.rows for bank in (short, middle, long)] == [2, 1, 1]
        assert short.slots >= 2 and short.capacity_tokens >= 5 and long.capacity_tokens >= 30
        token = rows.copies.layout.token_bytes
        for bank in (short, middle, long):
            assert bank.bytes == pytest.approx(bank.slots * bank.capacity_tokens * token, rel=0.01)
        rows.drop([RowId(2)])
        assert [bank.max_tokens for bank in rows.bank_stats()] == [8, 32]

    def test_a_long_row_makes_no_other_row_longer(self) -> None:
        """Of what this is for: 15 rows of 100 tokens beside one of 6,000. One layer holds as many
        tokens as four."""
        model = build("llama", config={**FAMILIES["llama"], "num_hidden_layers": 1})
        held = {}
        for name, first in ("banks", 512), ("one", 2**20):
            rows, _ = rows_for(model, PLAIN, shapes=attrs.evolve(EXACT, first_bank=first))
            assert isinstance(rows, SlotRows)
            for number, length in enumerate([100] * 15 + [6000]):
                rows.open(RowId(number), length)
                rows.prefill({RowId(number): [1] * length})
            held[name] = rows.nbytes / rows.copies.layout.token_bytes
        assert held["banks"] < 1.5 * (15 * 100 + 6000) + 16 * 256
        assert held["one"] > 16 * 6000, "the control"

    def test_rows_of_all_banks_decode_in_one_pass(
        self, rows: SlotRows, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.decoding(rows, [30, 3, 12, 4])
        called: list[int] = []
        plain = attention_seam.plain

        def counted(queries: mx.array, *rest: Any, **more: Any) -> mx.array:
            called.append(queries.shape[0])
            return plain(queries, *rest, **more)

        monkeypatch.setattr(attention_seam, "plain", counted)
        mx.eval(rows.decode(mx.array([1, 2, 3, 4])))
        assert called == [1, 1, 2] * len(model_of("llama").layers)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_banks_unless_they_compute_with_keys(name: str) -> None:
    found = rows_for(model_of(name), PLAIN)[1]
    if not guess_batching(model_of(name)).allows("batch"):
        assert not found.allows("banks")
    else:
        assert found.allows("banks") == (name not in COMPUTE_WITH_KEYS), found.banks


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.long(but=OF_EACH_KIND)
def test_every_family_reports_banks(name: str) -> None:
    """One where all rows share buffers, or have buffers of their own. Together they are what all
    rows hold."""
    rows, found = rows_for(model_of(name), PLAIN, shapes=SMALL_BANKS)
    for number, length in enumerate([3, 12, 30]):
        rows.open(RowId(number), length)
        mx.eval(rows.prefill({RowId(number): [1] * length}))
    banks = rows.bank_stats()
    assert [(bank.max_tokens, bank.rows) for bank in banks] == (
        [(8, 1), (16, 1), (32, 1)] if found.allows("banks") else [(None, 3)]
    )
    assert rows.nbytes - len(banks) <= sum(bank.bytes for bank in banks) <= rows.nbytes
    assert sum(bank.slots for bank in banks) >= 3
    assert all(bank.capacity_tokens >= 3 or not rows_have_lengths(rows) for bank in banks)


def rows_have_lengths(rows: Rows) -> bool:
    return not isinstance(rows, SlotRows) or bool(
        rows.copies.layout.token_bytes or rows.copies.layout.rings
    )


class TestSeam:
    """What the seam relies on. If one of these fails after an update of mlx-lm, look at
    attention_seam.py."""

    def test_arguments(self) -> None:
        assert list(inspect.signature(attention_seam.plain).parameters) == [
            "queries",
            "keys",
            "values",
            "cache",
            "scale",
            "mask",
            "sinks",
        ]

    def test_models_have_it_by_name(self) -> None:
        """Most modules import it; what calls `mx.fast` itself has no banks."""
        [folder] = map(Path, mlx_lm.models.__path__)
        importing = re.compile(r"from \.base import[^)]*\b" + attention_seam.NAME, re.DOTALL)
        assert sum(bool(importing.search(file.read_text())) for file in folder.glob("*.py")) > 90

    def test_other_callers_get_the_original(self) -> None:
        """base.py itself is not patched."""
        StepEngine(model_of("llama"), VOCABULARY)
        assert base.scaled_dot_product_attention is attention_seam.plain

    @pytest.mark.parametrize("width", [1, 3])
    def test_without_banks_nothing_changes(self, width: int) -> None:
        queries, keys = mx.random.normal((2, 4, width, 8)), mx.random.normal((2, 2, 7, 8))
        mask = mx.random.uniform(shape=(2, 1, width, 7)) > 0.3
        arguments = {"cache": None, "scale": 0.3, "mask": mask, "sinks": mx.zeros(4)}
        ours = attention_seam.scaled_dot_product_attention(queries, keys, keys, **arguments)
        assert mx.array_equal(ours, attention_seam.plain(queries, keys, keys, **arguments))

    def test_a_mask_over_all_rows_is_refused(self) -> None:
        parts = Parts([mx.zeros((1, 2, 3, 8))] * 2, [slice(0, 1), slice(1, 2)])
        with pytest.raises(TypeError):
            attention_seam.scaled_dot_product_attention(
                mx.zeros((2, 2, 1, 8)), parts, parts, scale=1.0, mask=mx.zeros(1)
            )


class TestLargeChunksOnDevicesThatPrepareShapes:
    SHAPES = attrs.evolve(ROUNDED, mask_elements=256)

    def test_they_attend_causally(self) -> None:
        region = Region(0, np.array([64], np.int32), np.array([8], np.int32), 8, self.SHAPES)
        assert region.causal and region.keys == 72
        assert not Region(
            0, np.array([20], np.int32), np.array([8], np.int32), 8, self.SHAPES
        ).causal

    def test_chunks_that_the_device_plans_for_get_copies_without_the_gaps_of_their_buffers(
        self,
    ) -> None:
        def chunk(length: int, width: int, rows: int = 1) -> Region:
            lengths = np.arange(length, length + rows, dtype=np.int32)
            return Region(0, lengths, np.full(rows, width, np.int32), width, ROUNDED)

        assert chunk(2048, 512).copied and not chunk(2048, 512).causal
        assert chunk(30_000, 512).copied and chunk(30_000, 512).causal
        assert not chunk(1024, 512).copied, "MLX's own kernel"
        assert not chunk(30_000, 8).copied, "drafts"
        assert not chunk(30_000, 1).copied
        assert not chunk(2048, 512, rows=2).copied

    @pytest.mark.parametrize("copied_width", [2, 1000])
    def test_copies_change_no_token(self, copied_width: int) -> None:
        cases = [
            Request(list(range(3, 3 + length)), 6, sampling=GREEDY) for length in (150, 140, 9)
        ]
        wanted = [
            Driver(StepEngine(model_of("llama"), VOCABULARY), 64).play([case])[0].tokens
            for case in cases
        ]
        shapes = attrs.evolve(ROUNDED, vector_tokens=32, copied_width=copied_width)
        engine = StepEngine(model_of("llama"), VOCABULARY, shapes=shapes)
        assert [row.tokens for row in Driver(engine, 64).play(cases)] == wanted

    def test_and_alone_with_the_same_tokens(self) -> None:
        cases = [
            Request(list(range(3, 3 + length)), 6, sampling=GREEDY) for length in (150, 140, 9)
        ]
        wanted = [
            Driver(StepEngine(model_of("llama"), VOCABULARY), 64).play([case])[0].tokens
            for case in cases
        ]
        engine = StepEngine(model_of("llama"), VOCABULARY, shapes=self.SHAPES)
        assert [row.tokens for row in Driver(engine, 64).play(cases)] == wanted


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that get the keys of another bank say something else."""
    cases = [
        Request([5 + row] * (30 if row == 1 else 4 + row), 12, sampling=GREEDY) for row in range(3)
    ]
    alone = [
        Driver(StepEngine(model_of("llama"), VOCABULARY)).play([case])[0].tokens for case in cases
    ]

    def played() -> list[list[int]]:
        return [
            row.tokens
            for row in Driver(StepEngine(model_of("llama"), VOCABULARY, shapes=SMALL_BANKS)).play(
                cases
            )
        ]

    assert played() == alone
    monkeypatch.setattr(JoinedSlots, "make_mask", lambda *_, **__: None)
    assert played() != alone


def test_a_scale_that_is_given_by_position_is_recorded() -> None:
    """As gpt_oss does: its server on CUDA ended in the warm-up, which repeats recorded calls."""
    queries, keys = mx.random.normal((1, 4, 1, 8)), mx.random.normal((1, 2, 7, 8))
    with attention_seam.recording() as calls:
        ours = attention_seam.scaled_dot_product_attention(queries, keys, keys, None, 0.3, None)
    again = attention_seam.plain(queries, keys, keys, None, **calls[0].options)
    assert mx.array_equal(ours, again)
