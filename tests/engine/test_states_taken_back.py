"""Recurrent states after drafts: those of the tokens that were kept, now and as of each length that
a snapshot may want."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from tests.engine.test_exactness import model_of
from tests.families import prompts
from tests.zoo.building import build
from trouper.engine.kv import attention_seam, recurrent_state
from trouper.engine.kv.kv_layout import kv_layout
from trouper.engine.kv.model_caches import guess_batching
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.kv.recorded_calls import (
    Recording,
    RecurrentCache,
    each_alone,
    keeps_padding_out,
    layers_with_cache,
    recorded_calls,
)
from trouper.engine.kv.recurrent_state import StateRows, StateSlots
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.passes.pass_shapes import EXACT
from trouper.protocol.plans import RowId

KINDS = ("qwen3_5", "falcon_h1", "lfm2", "rwkv7", "recurrent_gemma", "bailing_moe_linear", "jamba")
"""The mixer gets the cache; a list has it, beside KV; a convolution alone; two modules share one;
beside rings; positions are given; padding would be taken in."""
CLOSE = 1e-4
SLACK = 12
TEXTS = [tokens * 3 for tokens in prompts((9, 14, 6), 3)]


class Fed:
    """Rows that are fed their texts, as drafts or one by one."""

    def __init__(
        self,
        model: nn.Module,
        texts: Sequence[Sequence[int]] = TEXTS,
        *,
        first_bank: int = EXACT.first_bank,
    ) -> None:
        shapes = attrs.evolve(EXACT, first_bank=first_bank, shared_tokens=4 * first_bank)
        self.rows = SlotRows(model, guess_batching(model), PLAIN, SLACK, shapes)
        self.texts = {RowId(index): text for index, text in enumerate(texts)}
        for row, text in self.texts.items():
            self.rows.open(row, 6)
            self.rows.prefill({row: text[:5]})
            self.rows.promote(row)

    def decode(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.rows.move_outgrown()
            lengths = self.rows.lengths()
            mx.eval(
                self.rows.decode(
                    mx.array([self.texts[row][lengths[row]] for row in self.rows.decoding])
                )
            )

    def verify(self, **kept: int) -> None:
        """`kept`: how many draft tokens are right, by the row's number (`r0`). If that is odd, a
        wrong one follows. Rows that are not named draft nothing."""
        self.rows.move_outgrown()
        lengths, order = self.rows.lengths(), self.rows.decoding
        right = [kept.get(f"r{row}", 0) for row in order]
        fed = [
            [*self.texts[row][lengths[row] : lengths[row] + 1 + count], *([1] if count % 2 else [])]
            for row, count in zip(order, right, strict=True)
        ]
        counts = np.array([len(tokens) for tokens in fed], np.int32)
        padded = np.zeros((len(fed), int(counts.max())), np.int32)
        for index, tokens in enumerate(fed):
            padded[index, : len(tokens)] = tokens
        mx.eval(self.rows.verify(mx.array(padded), counts))
        self.rows.accepted(np.array(right, np.int32))

    def states(self, row: int, length: int | None = None) -> list[np.ndarray[Any, Any]]:
        at = self.rows.length(RowId(row)) if length is None else length
        return [
            np.array(part.astype(mx.float32)) for part in self.rows.copies.snapshot(RowId(row), at)
        ]

    def plain(self, model: nn.Module, row: int, length: int) -> list[np.ndarray[Any, Any]]:
        """The states of the same row alone, fed one by one."""
        alone = Fed(model, [self.texts[RowId(row)]])
        alone.decode(length - 5)
        return alone.states(0)


def assert_same(mine: list[np.ndarray[Any, Any]], wanted: list[np.ndarray[Any, Any]]) -> None:
    assert len(mine) == len(wanted) > 0
    for one, other in zip(mine, wanted, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=CLOSE * max(1.0, float(np.abs(other).max())))


@pytest.mark.parametrize("name", [*KINDS, "baichuan_m1", "longcat_flash_ngram"])
def test_f23_states_are_those_of_the_tokens_that_were_kept(name: str) -> None:
    """Rows that keep all, some and none of their drafts, beside one without; then the other way
    round."""
    model = build(name) if name not in KINDS else model_of(name)
    fed = Fed(model)
    fed.verify(r0=4, r1=1)
    fed.verify(r0=1, r1=3, r2=2)
    for row in range(3):
        assert_same(fed.states(row), fed.plain(model, row, fed.rows.length(RowId(row))))
    fed.decode()
    assert_same(fed.states(1), fed.plain(model, 1, fed.rows.length(RowId(1))))


@pytest.mark.parametrize("name", KINDS)
def test_a_snapshot_is_of_any_length_within_two_steps_with_drafts(name: str) -> None:
    """Also of the length at which the older of them began, and after a neighbour left and others
    changed places."""
    model = model_of(name)
    fed = Fed(model)
    fed.decode()
    begun = fed.rows.length(RowId(2))
    fed.verify(r0=2, r2=3)
    fed.verify(r1=1, r2=2)
    fed.rows.drop([RowId(0)])
    assert fed.rows.length(RowId(2)) == begun + 7
    for length in range(begun, begun + 8):
        assert_same(fed.states(2, length), fed.plain(model, 2, length))


def test_a_snapshot_reaches_over_a_plain_step() -> None:
    model = model_of("qwen3_5")
    fed = Fed(model)
    begun = fed.rows.length(RowId(1))
    fed.verify(r0=1, r1=3)
    fed.decode()
    for length in (begun, begun + 2, begun + 4, begun + 5):
        assert_same(fed.states(1, length), fed.plain(model, 1, length))


def test_rows_of_several_banks_have_one_order_of_states() -> None:
    """Rows outgrow their banks between the steps."""
    model = model_of("qwen3_5")
    fed = Fed(model, first_bank=8)
    for _ in range(3):
        fed.verify(r0=3, r1=1)
        fed.verify(r1=2, r2=1)
    for row in range(3):
        length = fed.rows.length(RowId(row))
        assert_same(fed.states(row), fed.plain(model, row, length))
        assert_same(fed.states(row, length - 1), fed.plain(model, row, length - 1))


def test_what_is_older_than_two_steps_is_refused() -> None:
    fed = Fed(model_of("lfm2"))
    begun = fed.rows.length(RowId(0))
    fed.verify(r0=2)
    fed.decode(2)
    with pytest.raises(AssertionError, match="of the last steps with drafts"):
        fed.states(0, begun + 1)


def test_only_the_states_of_rows_that_need_it_are_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No attention, and no row that keeps all of the pass: it has its state already."""
    model = model_of("qwen3_5")
    mixer = type(next(layer.linear_attn for layer in model.layers if "linear_attn" in layer))
    call, accepted = mixer.__call__, SlotRows.accepted
    repeated: list[tuple[int, int]] = []

    def counted(self: nn.Module, x: mx.array, *args: Any, **options: Any) -> mx.array:
        repeated.append((x.shape[0], x.shape[1]))
        return call(self, x, *args, **options)

    def watched(self: SlotRows, more: Any) -> None:
        with pytest.MonkeyPatch.context() as patch, attention_seam.recording() as attention:
            patch.setattr(mixer, "__call__", counted)
            accepted(self, more)
        assert not attention

    monkeypatch.setattr(SlotRows, "accepted", watched)
    fed = Fed(model)
    fed.verify(r0=2, r1=2, r2=2)
    assert not repeated, "all keep all"
    layers = sum("linear_attn" in layer for layer in model.layers)
    # Tries whether padding is kept out, and repeats the row without a draft, which took padding in.
    fed.verify(r0=2, r2=2)
    repeated.clear()
    fed.verify(r0=2, r2=2)
    assert not repeated, "all keep their own, and padding stays out"
    fed.verify(r0=1, r2=2)
    assert repeated == [(1, 2)] * layers


@pytest.mark.parametrize(("name", "groups", "repeated"), [("qwen3_5", 1, 2), ("jamba", 3, 3)])
def test_rows_share_repeated_passes_where_padding_is_kept_out(
    name: str, groups: int, repeated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a row without a draft needs none."""
    fed = Fed(model_of(name))
    fed.verify(r0=2, r1=4)  # The first one tries.
    sizes: list[int] = []
    put = StateSlots.put

    def counted(self: StateSlots, rows: Any, states: Sequence[mx.array]) -> None:
        sizes.append(len(states[0]))
        put(self, rows, states)

    monkeypatch.setattr(StateSlots, "put", counted)
    fed.verify(r0=3, r1=1)  # Of five tokens each row keeps another number: 4, 2 and 1.
    caches = len(fed.rows._states._caches)
    assert len(sizes) == groups * caches
    assert sum(sizes) == repeated * caches


@pytest.mark.parametrize(
    ("name", "pads"),
    [("qwen3_5", True), ("falcon_h1", True), ("nemotron_h", False), ("jamba", False)],
)
def test_asking_for_lengths_is_not_heeding_them(name: str, pads: bool) -> None:
    fed = Fed(build(name))
    fed.verify(r0=2, r1=4)
    passed = fed.rows._states._verified[-1]
    assert passed is not None
    assert all(layer.reads_lengths for layer in passed.layers) == (name != "jamba")
    assert keeps_padding_out(passed.layers, passed.recording) == pads == fed.rows._states._pads


def test_rows_are_grouped_by_their_tokens() -> None:
    rows, counts = np.array([1, 3, 4], np.int32), np.array([2, 1, 2], np.int32)
    found = [
        (picked.rows, picked.width, picked.counts)
        for picked in Recording(6, 3).picked(rows, counts)
    ]
    assert [(of.tolist(), width, own) for of, width, own in found if of is not None] == [
        ([3], 1, None),
        ([1, 4], 2, None),
    ]
    [padded] = Recording(3, 3).picked(
        np.arange(3, dtype=np.int32), counts, lambda counts: [range(len(counts))]
    )
    assert padded.rows is None
    assert padded.counts is not None
    assert padded.counts.tolist() == [2, 1, 2]
    assert each_alone([1, 1, 4, 5, 5]) == [range(2), range(2, 3), range(3, 5)]


def test_modules_have_their_own_classes_outside_of_recorded_passes() -> None:
    """Also after a pass that failed; and what is recorded is the innermost call, with its
    arguments."""
    model = model_of("rwkv7")
    modules = layers_with_cache(model)
    kinds = [type(module) for module in modules]
    caches = [RecurrentCache(len(cache.cache)) for cache in model.make_cache()]
    for cache in caches:
        cache.calls = []
    with recorded_calls(modules):
        assert all(
            issubclass(type(module), kind) for module, kind in zip(modules, kinds, strict=True)
        )
        assert all(
            type(module).__name__ == kind.__name__
            for module, kind in zip(modules, kinds, strict=True)
        )
        model(mx.array([[1, 2, 3]]), cache=caches)
    assert [type(module) for module in modules] == kinds
    names = [[type(call.module).__name__ for call in cache.calls or ()] for cache in caches]
    assert names == [
        [type(layer.attn).__name__, type(layer.ffn).__name__] for layer in model.layers
    ]
    with pytest.raises(ValueError, match="unpack"), recorded_calls(modules):
        model(mx.array([1, 2, 3]), cache=caches)
    assert [type(module) for module in modules] == kinds


def test_nothing_of_before_is_kept_longer_than_it_may_be_wanted() -> None:
    fed = Fed(model_of("qwen3_5"))
    states = fed.rows._states.nbytes
    fed.verify(r0=2)
    passed = fed.rows._states.nbytes - states
    assert passed > states
    fed.verify(r0=2)
    assert fed.rows._states.nbytes == states + 2 * passed
    fed.verify(r0=2)
    assert fed.rows._states.nbytes == states + 2 * passed
    fed.decode(recurrent_state.STEPS_BACK)
    assert fed.rows._states.nbytes == states
    fed.verify(r0=2)
    fed.rows.drop(list(fed.texts))
    assert fed.rows.nbytes == 0


@pytest.mark.parametrize("name", KINDS)
def test_what_is_kept_of_before_is_counted_as_memory_of_the_rows(name: str) -> None:
    """The states before a pass that verifies drafts, and the arguments of the calls that are
    repeated from them."""
    model, drafted = model_of(name), 4
    fed = Fed(model)
    before = fed.rows._states.nbytes
    for _ in range(2):
        fed.verify(r0=drafted)
    layers = [
        layer
        for passed in fed.rows._states._verified
        if passed is not None
        for layer in passed.layers
    ]
    arguments = sum(
        value.nbytes
        for layer in layers
        for call in layer.calls
        for value in call.arguments.values()
        if isinstance(value, mx.array)
    )
    assert arguments > 0 and fed.rows._states.nbytes >= 3 * before + arguments
    counted = kv_layout(model, PLAIN, draft_tokens=drafted).draft_state_bytes
    assert (
        fed.rows._states.nbytes - before
        <= len(TEXTS) * counted
        < 1.1 * (fed.rows._states.nbytes - before)
    )


def test_a_state_that_nobody_changes_is_refused() -> None:
    rows = StateRows([StateSlots(1)])
    rows.open(RowId(0))
    rows._caches[0]._prefilling[0].cache = [mx.zeros((1, 2))]
    rows.promote(RowId(0))
    counts = np.full(1, 2, np.int32)
    rows.begin([RowId(0)], counts)
    with pytest.raises(AssertionError, match="no module was seen"):
        rows.verified(np.zeros(1, np.int32), counts, 2)


def test_what_was_before_is_kept_where_a_model_changes_arrays_in_place() -> None:
    states = StateSlots(1)
    states.open()
    states._prefilling[0].cache = [mx.ones((1, 2))]
    states.promote(0)
    states.begin()
    states.record()
    states.view.cache[0] *= 3
    states.view.cache[0][:, 0] = 7
    assert states.view.calls is not None
    states.view.calls += [None]  # type: ignore[list-item]  # It matters only that there is one.
    assert [state.tolist() for state in states.recorded().before] == [[[1, 1]]]
    assert states.view.cache[0].tolist() == [[7, 3]]
