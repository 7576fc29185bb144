"""KV slots against mlx-lm's caches for one row: whatever joins, leaves, swaps and widths there
were, attention is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache

from tests.arithmetic import TF32, releases_late
from tests.engine.driver import Driver, Orders, Request, Row
from tests.families import build
from tests.family_configs import VOCABULARY
from tests.long_tests import examples
from trouper.engine.kv.full_slots import FullSlots
from trouper.engine.kv.recurrent_state import StateSlots
from trouper.engine.kv.ring_slots import RingSlots
from trouper.engine.kv.slot_buffers import compact
from trouper.engine.kv.slot_cache import SlotCache
from trouper.engine.passes import pass_shapes
from trouper.engine.passes.pass_shapes import ROUNDED
from trouper.engine.passes.region import Region
from trouper.engine.platform.eager_eval import copied
from trouper.engine.step import StepEngine
from trouper.protocol.plans import Plan, RowId

HEADS, DIM, WINDOW = 2, 4, 5
SCALE = DIM**-0.5


@pytest.fixture(autouse=True, scope="module")
def _small_steps() -> Iterator[None]:
    """Buffers grow after a few tokens, so that short examples meet it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pass_shapes, "STEP", 4)
        yield


@given(st.integers(0, 8), st.integers(0, 8), st.data())
def test_compact_closes_holes_with_the_fewest_moves(
    decoding: int, prefilling: int, data: st.DataObject
) -> None:
    everyone = list(range(decoding + prefilling))
    kept = [place for place in everyone if data.draw(st.booleans())]
    first = [place for place in kept if place < decoding]
    moves, arranged = compact(first, [place for place in kept if place >= decoding])
    buffer = everyone.copy()
    for source, target in moves:
        buffer[target] = buffer[source]
    assert buffer[: len(kept)] == arranged
    assert sorted(arranged[: len(first)]) == first, "who decodes goes on decoding"
    assert sorted(arranged) == kept
    displaced = sum(place >= len(first) for place in first)
    displaced += sum(not len(first) <= place < len(kept) for place in kept[len(first) :])
    assert len(moves) == displaced, "who is in place stays there"


@attrs.define
class Pair:
    """Slots, and for each slot the single-row cache that it must equal. `longer` also takes the
    model's window."""

    slots: SlotCache
    alone: Callable[[], Any]
    window: int | None
    dice: np.random.RandomState
    rows: list[Any] = attrs.field(factory=list)
    lengths: list[int] = attrs.field(factory=list)

    def open(self) -> None:
        self.rows.append(self.alone())
        self.lengths.append(0)
        self.slots.hold(len(self.rows))

    def move(self, moves: list[tuple[int, int]]) -> None:
        """As SlotRows moves rows: all at once, each as far as it is long."""
        rows = [copied(self.slots.row(source, self.lengths[source])) for source, _ in moves]
        for (_, target), row in zip(moves, rows, strict=True):
            if row:
                self.slots.put_row(target, row)

    def swap(self, a: int, b: int) -> None:
        self.move([(a, b), (b, a)])
        for held in (self.rows, self.lengths):
            held[a], held[b] = held[b], held[a]

    def keep(self, kept: list[int], *, exactly: bool | None = None) -> None:
        """Rows leave. `exactly`: see `SlotCache.fit`; None: either, by the dice."""
        moves, arranged = compact(kept, [])
        self.move(moves)
        self.rows = [self.rows[place] for place in arranged]
        self.lengths = [self.lengths[place] for place in arranged]
        if self.rows:
            exactly = bool(self.dice.randint(2)) if exactly is None else exactly
            self.slots.fit(len(self.rows), max(self.lengths) + 1, exactly=exactly)
        else:
            self.slots.clear()
            assert self.slots.nbytes == 0

    def forward(self, start: int, counts: list[int]) -> None:
        """One pass over slots from `start` on; each row's output equals its own cache's."""
        width, stop = max(counts), start + len(counts)
        width = self.slots.shapes.width(width)
        queries, keys, values = (self._random(len(counts), width) for _ in range(3))
        lengths = np.array(self.lengths[start:stop], np.int32)
        self.slots.begin(
            Region(start, lengths, np.array(counts, np.int32), width, self.slots.shapes)
        )
        mask = self.slots.make_mask(width, window_size=self.window)  # type: ignore[attr-defined]
        fetched = self.slots.update_and_fetch(keys, values)  # type: ignore[attr-defined]
        out = mx.fast.scaled_dot_product_attention(queries, *fetched, scale=SCALE, mask=mask)
        mx.eval(out, self.slots.state())
        self.slots.finish()
        for place, count in enumerate(counts):
            if count:
                taken = (queries[place : place + 1, :, :count], keys[place : place + 1, :, :count])
                wanted = self._alone(
                    self.rows[start + place], *taken, values[place : place + 1, :, :count]
                )
                np.testing.assert_allclose(
                    np.array(out[place, :, :count]),
                    np.array(wanted[0]),
                    atol=5e-3 if TF32 else 1e-5,
                )
                self.lengths[start + place] += count

    def _alone(self, cache: Any, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        mask = cache.make_mask(queries.shape[2], return_array=True, window_size=self.window)
        fetched = cache.update_and_fetch(keys, values)
        return mx.fast.scaled_dot_product_attention(queries, *fetched, scale=SCALE, mask=mask)

    def _random(self, rows: int, width: int) -> mx.array:
        return mx.array(self.dice.standard_normal((rows, HEADS, width, DIM)).astype(np.float32))


def rounded(cache: SlotCache) -> SlotCache:
    cache.shapes = ROUNDED
    return cache


KINDS: dict[str, Callable[[np.random.RandomState], Pair]] = {
    "full": lambda dice: Pair(FullSlots(), KVCache, None, dice),
    "full, windowed by the mask": lambda dice: Pair(FullSlots(), KVCache, WINDOW, dice),
    "ring": lambda dice: Pair(RingSlots(WINDOW), lambda: RotatingKVCache(WINDOW), WINDOW, dice),
    "full, of rounded shapes": lambda dice: Pair(rounded(FullSlots()), KVCache, None, dice),
    "ring with slack, of rounded shapes": lambda dice: Pair(
        rounded(RingSlots(WINDOW, slack=3)), lambda: RotatingKVCache(WINDOW), WINDOW, dice
    ),
    "ring with slack": lambda dice: Pair(
        RingSlots(WINDOW, slack=3), lambda: RotatingKVCache(WINDOW), WINDOW, dice
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(120))
@given(data=st.data())
def test_r1_slots_equal_single_row_caches(kind: str, data: st.DataObject) -> None:
    pair = KINDS[kind](np.random.RandomState(3))
    pair.open()
    for _ in range(data.draw(st.integers(1, 10), "operations")):
        rows = len(pair.rows)
        match data.draw(
            st.sampled_from(
                ["open", "decode", "prefill", "prefill", "swap", "drop"] if rows else ["open"]
            )
        ):
            case "open":
                pair.open()
            case "decode":
                pair.forward(0, [1] * data.draw(st.integers(1, rows)))
            case "prefill":
                start = data.draw(st.integers(0, rows - 1))
                width = data.draw(st.integers(1, 2 * WINDOW))
                more = st.lists(st.integers(0, width), max_size=rows - start - 1)
                pair.forward(start, [width, *data.draw(more)])
            case "swap":
                pair.swap(data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, rows - 1)))
            case "drop":
                pair.keep(sorted(data.draw(st.sets(st.integers(0, rows - 1)))))


def test_the_comparison_can_fail() -> None:
    pair = KINDS["full"](np.random.RandomState(3))
    pair.open()
    pair.forward(0, [6])
    pair.lengths[0] -= 1
    with pytest.raises(AssertionError, match="Not equal"):
        pair.forward(0, [1])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_kv_have_a_slot_in_every_buffer(kind: str) -> None:
    """A row whose prompt is one token overtakes others before any pass was over its slot. An index
    beyond a buffer's end is not an error in MLX: it wrote into other people's memory, and some
    steps later the process died."""
    pair = KINDS[kind](np.random.RandomState(3))
    for _ in range(5):
        pair.open()
    pair.forward(0, [7])
    assert all(buffer.shape[0] >= 5 for buffer in pair.slots.state())
    pair.swap(0, 4)
    pair.forward(4, [1])


def test_the_offset_counts_what_the_pass_has_written() -> None:
    """Layers that share another one's KV ask for it after that one's update."""
    cache = FullSlots()
    cache.hold(2)
    cache.begin(Region(0, np.array([3, 5], np.int32), np.array([2, 1], np.int32), 2))
    assert np.array(cache.offset).tolist() == [3, 5]
    cache.update_and_fetch(mx.zeros((2, 1, 2, 4)), mx.zeros((2, 1, 2, 4)))
    assert np.array(cache.offset).tolist() == [5, 7]
    cache.finish()
    cache.begin(Region(1, np.array([6], np.int32), np.array([1], np.int32), 1))
    assert np.array(cache.offset).tolist() == [6]


@pytest.mark.parametrize("exactly", [False, True])
def test_buffers_grow_and_shrink(exactly: bool) -> None:
    """After a burst of rows their slots are freed, and after a long row its tokens, whether buffers
    shrink exactly or not."""
    pair = KINDS["full"](np.random.RandomState(3))
    for _ in range(20):
        pair.open()
    pair.forward(0, [2] * 20)
    pair.forward(0, [50])
    burst = pair.slots.nbytes
    pair.keep([0, 5], exactly=exactly)
    assert pair.slots.nbytes < burst / 4
    long_row = pair.slots.nbytes
    pair.forward(0, [1, 1])
    pair.keep([1], exactly=exactly)
    assert pair.slots.nbytes < long_row / 4
    pair.forward(0, [1])
    pair.keep([])


@releases_late
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_copies_no_buffer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_shapes, "STEP", 1024)
    rows, tokens = 8, 1024
    cache = FullSlots() if kind.startswith("full") else RingSlots(tokens)
    lengths = np.arange(tokens // 2, tokens // 2 + rows).astype(np.int32)
    new = mx.ones((rows, HEADS, 1, 64))
    mx.eval(new)

    def write() -> None:
        cache.begin(Region(0, lengths.copy(), np.ones(rows, np.int32), 1))
        keys, values = cache.update_and_fetch(new, new)
        mx.eval(keys[..., -1:, :] + values[..., -1:, :], cache.state())
        del keys, values
        cache.finish()
        lengths[:] += 1

    write()
    buffer = min(held.nbytes for held in cache.state())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):  # still within the capacity of the first write
        write()
    assert mx.get_peak_memory() - before < buffer / 4
    assert mx.get_active_memory() == before


class Watching(Driver):
    """Notes by how much memory rose during each step, above what was held before it."""

    def __init__(self, engine: StepEngine, orders: Orders | None = None) -> None:
        super().__init__(engine, orders=orders)
        self.rises: list[int] = []

    def _take(self, plan: Plan, rows: dict[RowId, Row]) -> None:
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        super()._take(plan, rows)
        self.rises.append(mx.get_peak_memory() - before)


@releases_late
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_r1_pipelined_decoding_copies_no_buffer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole engine: a step is launched while the last one, which reads the same buffers, still
    runs."""
    monkeypatch.setattr(pass_shapes, "STEP", 8192)
    driver = Watching(StepEngine(build(name), VOCABULARY))
    driver.play([Request([1 + row, 2, 3], 30) for row in range(8)])
    first, *steps = driver.rises
    buffer = 8 * 8192 * 2 * 16 * 4
    assert first > buffer, "the control: this step made the buffers"
    assert max(steps) < buffer / 4, steps


def test_recurrent_states_stay_with_their_rows() -> None:
    """Decoding rows are stacked in slot order; prefilling rows keep their own, in theirs."""
    states = StateSlots(2)
    for row in range(5):
        states.open()
        states.begin(row)
        states.view.cache = [mx.full((1, 2), row), mx.full((1, 3), 10 + row)]
        states.finish()
    states.promote(2)  # 2 | 1 0 3 4, as rows.py swaps the overtaken row into the place of the other
    states.promote(2)  # 2 3 | 0 1 4
    assert [int(row[0].item()) for row in states._decoding.cache[0]] == [2, 3]
    states.keep([1], [2, 0])
    assert states._decoding.cache[1].tolist() == [[13, 13, 13]]
    assert [cache.cache[0].tolist() for cache in states._prefilling] == [[[4, 4]], [[0, 0]]]
    states.keep([], [])
    assert states.nbytes == 0
