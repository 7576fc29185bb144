"""What was stored and restored is what was computed: every architecture, in every way that KV can
come back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from tests.arithmetic import CERTAIN, CLOSE, TF32, releases_late
from tests.engine.driver import GREEDY, Driver, Orders, Request, Row, only_bank
from tests.engine.test_exactness import engine_of, every_family, model_of, one_half, other_half
from tests.engine.test_slots import Watching
from tests.families import build, prompts
from tests.family_configs import OF_EACH_KIND, VOCABULARY
from trouper.engine.adaptations import adaptation_registry
from trouper.engine.adaptations.adaptation_registry import Adaptation, Adapted
from trouper.engine.kv.block_store import BlockArrays, BlockStore, readable, stored_from
from trouper.engine.kv.kv_layout import ArrayShape, Layout, kv_layout, layout_of
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.kv.single_rows import SingleRows
from trouper.engine.passes import pass_shapes
from trouper.engine.step import StepEngine
from trouper.protocol.blocks import Tensors
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.plans import Admit, BlockId, Chunk, Load, Plan, Restore, RowId, Store
from trouper.protocol.replies import TokenLogprobs

PROMPT = prompts()[4]
"""100 tokens: more than any window."""
OTHERS = [prompts()[place] for place in (1, 3, 5)]
SIZE, CHUNK, TOKENS, AHEAD = 16, 32, 16, 5
"""Of a block, of a prefill chunk, of an answer, and of the part of the answer that is stored."""
WHOLE = len(PROMPT) + AHEAD
CUT_ANYWHERE = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "phi3",
    "mixtral",
    "deepseek_v3",
    "kimi_k25",
    "llama4_text",
]


ALONE = Capabilities(batch="rows of different lengths differ")


@cache
def cold(name: str) -> Row:
    [row] = Driver(engine_of(name), CHUNK).play([Request(PROMPT, TOKENS, logprobs=3)])
    return row


def layout(name: str) -> Layout:
    rows = engine_of(name)._rows
    return rows.copies.layout  # type: ignore[attr-defined]


def ids(first: int, count: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(first + place) for place in range(count))


def sizes(tokens: int, size: int = SIZE) -> tuple[int, ...]:
    return (*[size] * (tokens // size), *[tokens % size][: tokens % size])


def store(name: str, row: int, tokens: int, first: int = 0, snapshot: int = 900) -> Store:
    """All of a row's tokens, and what cannot be cut, if the model has any of it."""
    needs = layout(name).snapshot_bytes > 0
    parts = sizes(tokens)
    return Store(RowId(row), 0, parts, ids(first, len(parts)), BlockId(snapshot) if needs else None)


def restore(
    order: Store, tokens: int, blocks: int | None = None, source: int | None = None
) -> Restore:
    """Of the first `blocks` of an order, or of as many as there are tokens for, the rest from a
    live row."""
    count = -(-tokens // SIZE) if blocks is None else blocks
    return Restore(
        tokens, order.blocks[:count], None if source is None else RowId(source), order.snapshot
    )


def continued(name: str, restored: Restore, join: int) -> Request:
    """The prompt and what was answered so far, to be answered on: the rest of the cold answer."""
    prompt = [*PROMPT, *cold(name).tokens[: restored.tokens - len(PROMPT) + 1]]
    return Request(
        prompt, TOKENS + len(PROMPT) - len(prompt), join=join, logprobs=3, restore=restored
    )


def runs_alone(_: nn.Module, found: Adapted) -> bool:
    found.alone = "a test says so"
    return True


def again(restored: Restore, join: int) -> Request:
    return Request(PROMPT, TOKENS, join=join, logprobs=3, restore=restored)


def close(row: Row, wanted: Row) -> bool:
    """The same answer to its end, where the row may have begun inside of it. With inexact
    arithmetic up to a token that rounding may change."""
    tokens, logprobs = wanted.tokens[-len(row.tokens) :], wanted.logprobs[-len(row.logprobs) :]
    same = common(row.tokens, tokens)
    gap = max(
        np.abs(np.array(mine.top)[:, 1] - np.array(theirs.top)[:, 1]).max()
        for mine, theirs in zip(row.logprobs[: same + 1], logprobs[: same + 1], strict=True)
    )
    return bool(gap < CLOSE) and (same == len(tokens) or (TF32 and lead(logprobs[same]) <= CERTAIN))


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two answers begin with alike."""
    pairs = enumerate(zip(first, second, strict=True))
    return next((place for place, (mine, theirs) in pairs if mine != theirs), len(first))


def lead(logprobs: TokenLogprobs) -> float:
    """By how much the best token beats the next."""
    (_, first), (_, second), *_ = logprobs.top
    return first - second


def company(leave: int = 9) -> list[Request]:
    """Rows that were there before, and one of them leaves while others restore."""
    return [
        Request(prompt, TOKENS, leave=leave if place == 0 else None)
        for place, prompt in enumerate(OTHERS)
    ]


def play(
    name: str, requests: Sequence[Request], orders: Orders, engine: StepEngine | None = None
) -> tuple[list[Row], Driver]:
    """All restored requests answer as the cold row did, and compute only what was not restored."""
    driver = Driver(engine or engine_of(name), CHUNK, orders)
    rows = driver.play(requests)
    for row in rows:
        if row.request.restore is not None:
            assert close(row, cold(name)), row.request.restore
            assert driver.prefilled[row.id] == len(row.request.prompt) - row.request.restore.tokens
    return rows, driver


# With chunks of 32 a row of 100 tokens prefills in steps 0 to 3 and then decodes. Before step 3 it
# holds 96 tokens, before step 4 + n its prompt and n answered ones.


class TestRestored:
    """Every family through bytes, which others of its kind do in all ways."""

    @one_half
    def test_d10_from_a_row_that_prefills(self, name: str) -> None:
        order = store(name, 0, 3 * CHUNK)
        requests = [
            Request(PROMPT, TOKENS),
            again(restore(order, 3 * CHUNK), 3),
            again(restore(order, 3 * CHUNK, blocks=2, source=0), 3),
            again(restore(order, 3 * CHUNK), 8),
        ]
        rows, _ = play(name, requests, {3: {"store": (order,)}})
        assert rows[0].tokens == cold(name).tokens, "who was copied goes on"

    @other_half
    def test_d10_from_a_row_that_decodes_among_others(self, name: str) -> None:
        others = company()
        order = store(name, 3, WHOLE)
        requests = [
            *others,
            Request(PROMPT, TOKENS, logprobs=3),
            continued(name, restore(order, WHOLE), 4 + AHEAD),
            continued(name, restore(order, WHOLE, blocks=3, source=3), 4 + AHEAD),
            continued(name, restore(order, WHOLE), 10 + AHEAD),
        ]
        rows, _ = play(name, requests, {4 + AHEAD: {"store": (order,)}})
        assert close(rows[3], cold(name))
        alone = [row.tokens for row in Driver(engine_of(name), CHUNK).play(others)]
        assert [row.tokens for row in rows[:3]] == alone

    @one_half
    def test_d10_stored_as_the_row_leaves(self, name: str) -> None:
        order = store(name, 0, WHOLE)
        requests = [
            Request(PROMPT, TOKENS, leave=4 + AHEAD),
            Request(OTHERS[1], TOKENS),
            continued(name, restore(order, WHOLE), 4 + AHEAD),
            continued(name, restore(order, WHOLE), 6 + AHEAD),
        ]
        play(name, requests, {4 + AHEAD: {"store": (order,)}})

    @every_family
    @pytest.mark.long(but=OF_EACH_KIND)
    def test_f2_f6_through_bytes_into_another_engine(self, name: str) -> None:
        order = store(name, 0, WHOLE)
        kept = [*order.blocks, *([] if order.snapshot is None else [order.snapshot])]
        plans: Orders = {
            4 + AHEAD: {"store": (order,), "persist": tuple(kept)},
            5 + AHEAD: {"evict": tuple(kept)},
        }
        _, first = play(name, [Request(PROMPT, TOKENS)], plans)
        loads = tuple(
            Load(block, payload) for block, payload in zip(kept, first.persisted, strict=True)
        )
        plans = {0: {"load": loads}, 3: {"evict": tuple(kept)}}
        driver = play(name, [*company(), continued(name, restore(order, WHOLE), 0)], plans)[1]
        assert driver.engine.blocks.nbytes == 0

    @other_half
    def test_a_block_may_be_used_in_part(self, name: str) -> None:
        """Where everything can be cut at a token; others need a snapshot there."""
        assert (name in CUT_ANYWHERE) == (layout(name).snapshot_bytes == 0)
        if name not in CUT_ANYWHERE:
            return
        order = store(name, 0, 3 * CHUNK)
        requests = [
            Request(PROMPT, TOKENS),
            *(
                again(restore(order, tokens), join)
                for tokens, join in ((1, 3), (16, 3), (41, 4), (95, 9))
            ),
            again(Restore(50, (), RowId(0)), 5),
            again(Restore(len(PROMPT) - 1, order.blocks[:1], RowId(0)), 6),
        ]
        play(name, requests, {3: {"store": (order,)}})

    @one_half
    def test_snapshots_of_short_rows(self, name: str) -> None:
        """A ring that is not full, a state after one token."""
        one, six = (
            store(name, 0, 1, first=10, snapshot=901),
            store(name, 0, 6, first=20, snapshot=902),
        )
        requests = [again(restore(one, 1), 3), again(restore(six, 6), 3)]
        orders: Orders = {1: {"store": (one,)}, 2: {"store": (six,)}}
        driver = Driver(engine_of(name), lambda step: (1, 5, 200)[min(step, 2)], orders)
        for row in driver.play([Request(PROMPT, TOKENS, logprobs=3), *requests]):
            assert close(row, cold(name))

    @other_half
    def test_what_a_token_and_a_snapshot_weigh(self, name: str) -> None:
        card, order = kv_layout(model_of(name), PLAIN), store(name, 0, WHOLE)
        engine = engine_of(name)
        driver = Driver(engine, CHUNK, {4 + AHEAD: {"store": (order,)}})
        driver.play([Request(PROMPT, TOKENS)])
        assert engine.blocks.nbytes == WHOLE * card.token_bytes + card.snapshot_bytes
        assert card.cached and card.description


class TestTheComparisonCanFail:
    def test_one_wrong_value(self) -> None:
        assert self._close_with(0)
        assert not self._close_with(3)

    def _close_with(self, error: float) -> bool:
        order = store("llama", 0, WHOLE)

        class Meddling(Driver):
            def _take(self, plan: Plan, rows: dict[RowId, Row]) -> None:
                if plan.step == 5 + AHEAD:
                    _bend(self.engine.blocks, BlockId(1), error)
                super()._take(plan, rows)

        driver = Meddling(engine_of("llama"), CHUNK, {4 + AHEAD: {"store": (order,)}})
        rows = driver.play(
            [Request(PROMPT, TOKENS), continued("llama", restore(order, WHOLE), 5 + AHEAD)]
        )
        return close(rows[1], cold("llama"))


def _bend(blocks: BlockStore, block: BlockId, error: float) -> None:
    stored = blocks._stored[block]
    values = np.array(stored.arrays[0])
    values[0, 0, 0] += error
    blocks._stored[block] = attrs.evolve(stored, arrays=(mx.array(values),))


class TestOrdersThatAreWrong:
    """A plan that does not fit what is there ends the step, before a wrong answer is given."""

    @pytest.mark.parametrize(
        ("wrong", "told"),
        [
            (Restore(97, ids(0, 6)), "last block has nothing|not as long"),
            (Restore(80, ids(0, 6)), "the last block has nothing to give"),
            (Restore(96, ids(0, 5)), "not as long"),
            (Restore(96, ids(0, 6), RowId(0)), "nothing is left"),
            (Restore(99, ids(0, 6), RowId(0)), "tokens that the row does not have"),
            (Restore(96, ids(0, 6), None, BlockId(900)), "a snapshot too few, or too many"),
            (Restore(100, ids(0, 6), RowId(0)), "one token of a prompt must be computed"),
        ],
    )
    def test_f3_f6_lengths_are_asserted(self, wrong: Restore, told: str) -> None:
        order = store("llama", 0, 3 * CHUNK)
        driver = Driver(engine_of("llama"), CHUNK, {3: {"store": (order,)}})
        with pytest.raises(AssertionError, match=told):
            driver.play([Request(PROMPT, TOKENS), again(wrong, 3)])

    @pytest.mark.parametrize(
        ("name", "wrong", "told"),
        [
            ("llama", Store(RowId(0), 0, (97,), ids(0, 1)), "tokens that the row does not have"),
            ("llama", Store(RowId(0), 0, (0,), ids(0, 1)), "tokens that the row does not have"),
            ("llama", Store(RowId(0), 0, (16, 16), ids(0, 1)), "zip"),
            ("gpt_oss", Store(RowId(0), 0, (32,), ids(0, 1), BlockId(9)), "a snapshot is of now"),
        ],
    )
    def test_what_is_not_there_is_not_stored(self, name: str, wrong: Store, told: str) -> None:
        driver = Driver(engine_of(name), CHUNK, {3: {"store": (wrong,)}})
        with pytest.raises((AssertionError, ValueError), match=told):
            driver.play([Request(PROMPT, TOKENS)])

    def test_f6_a_snapshot_of_another_length(self) -> None:
        early, late = (
            store("gpt_oss", 0, CHUNK),
            store("gpt_oss", 0, 2 * CHUNK, first=50, snapshot=901),
        )
        driver = Driver(
            engine_of("gpt_oss"), CHUNK, {1: {"store": (early,)}, 2: {"store": (late,)}}
        )
        mixed = attrs.evolve(restore(late, 2 * CHUNK), snapshot=early.snapshot)
        with pytest.raises(AssertionError, match="of another length"):
            driver.play([Request(PROMPT, TOKENS), again(mixed, 2)])

    def test_f5_a_hit_makes_no_stored_array_anew(self) -> None:
        """However often a block is restored, whatever its borrowers write: the same arrays, the
        same bytes."""
        order = store("llama", 0, 3 * CHUNK)
        engine = engine_of("llama")
        driver = Driver(engine, CHUNK, {3: {"store": (order,)}})
        driver.play([Request(PROMPT, TOKENS)])

        def stored() -> dict[BlockId, tuple[list[int], list[bytes]]]:
            kept = engine.blocks._stored.items()
            return {
                block: (
                    [id(array) for array in one.arrays],
                    [np.array(array).tobytes() for array in one.arrays],
                )
                for block, one in kept
            }

        before = stored()
        for joins in ((0,), (0, 0, 3)):  # alone, and beside others
            rows = driver.play([again(restore(order, 3 * CHUNK), join) for join in joins])
            assert all(close(row, cold("llama")) for row in rows)
        assert before and stored() == before

    def test_a_model_whose_rows_run_alone_has_no_blocks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            adaptation_registry, "REGISTRY", [Adaptation("none can be batched", runs_alone)]
        )
        model = build("llama")
        engine = StepEngine(model, VOCABULARY)
        assert not kv_layout(model, PLAIN).cached
        with pytest.raises(AssertionError, match="cannot be stored"):
            engine.launch(Plan(0, evict=ids(0, 1)))

    @pytest.mark.parametrize("name", ["llama", "gemma2", "mamba2"])
    def test_what_a_row_keeps_that_runs_alone_is_measured(self, name: str) -> None:
        """`--kv-memory` bounded no such rows."""
        kv, rows = kv_layout(model_of(name), PLAIN, ALONE), SingleRows(model_of(name))
        for tokens in (5, 1000):
            row = RowId(tokens)
            rows.open(row)
            rows.prefill({row: [1] * tokens})
            assert rows.nbytes / 2 <= kv.row_bytes(tokens) <= rows.nbytes * 3, tokens
            rows.drop([row])

    def test_rows_that_cannot_be_restored_are_counted(self) -> None:
        kv, usual = (
            kv_layout(model_of("gemma2"), PLAIN, allowed)
            for allowed in (Capabilities(restore="differs"), Capabilities())
        )
        assert (kv.cached, kv.needs_snapshots) == (False, False)
        assert kv.row_bytes(1000) == usual.row_bytes(1000) > 0


class TestPayloads:
    SHAPES = Layout(
        ((ArrayShape((2, 1, 4), mx.float32), ArrayShape((1, 1, 8), mx.bfloat16)),), (), ()
    )

    def payload(self, tokens: int = 5) -> Tensors:
        values = [
            mx.random.normal(shape.dims).astype(shape.dtype) for shape in self.SHAPES.block(tokens)
        ]
        return readable(BlockArrays(tokens, tuple(values))).read()

    def test_there_and_back(self) -> None:
        mx.random.seed(4)
        sent = self.payload()
        assert [(tensor.dtype, tensor.shape) for tensor in sent] == [
            ("U32", (2,)),
            ("F32", (2, 5, 4)),
            ("BF16", (1, 5, 8)),
        ]
        stored = stored_from(sent, self.SHAPES)
        assert stored.tokens == 5 and not stored.snapshot
        assert [bytes(tensor.data) for tensor in readable(stored).read()] == [
            bytes(tensor.data) for tensor in sent
        ]
        stored_from(
            tuple(attrs.evolve(tensor, data=bytes(tensor.data)) for tensor in sent), self.SHAPES
        )

    def test_a_snapshot_of_a_short_row_is_short(self) -> None:
        """A ring that is not full has no tokens to give."""
        layout = layout_of(model_of("gpt_oss"), PLAIN)
        [window] = {ring.dims[0] for leaf in layout.rings for ring in leaf}
        for tokens in (1, window - 1, window, window + 1, 10 * window):
            assert {shape.dims[0] for shape in layout.snapshot(tokens)} == {min(tokens, window)}

    def test_other_shapes_have_another_digest(self) -> None:
        """Bytes of the disk that do not fit would end the engine, so they are of another
        namespace."""
        rings = attrs.evolve(self.SHAPES, full=(), rings=self.SHAPES.full)
        turned = attrs.evolve(self.SHAPES, full=(self.SHAPES.full[0][::-1],))
        digests = [
            layout.digest
            for layout in (self.SHAPES, rings, turned, layout_of(model_of("gpt_oss"), PLAIN))
        ]
        assert len({*digests}) == 4
        assert digests[3] == layout_of(model_of("gpt_oss"), PLAIN).digest

    def test_what_does_not_fit_is_refused(self) -> None:
        head, first, second = self.payload()
        for payload, told in [
            ((), "does not begin"),
            ((first, second), "does not begin"),
            ((head, first), "has 1 arrays where this model has 2"),
            (
                (head, second, first),
                r"has BF16 \(1, 5, 8\) in 80 bytes where this model has F32 \(2, 5, 4\)",
            ),
            (
                (head, attrs.evolve(first, data=bytes(8)), second),
                r"in 8 bytes where this model has F32",
            ),
            ((head, attrs.evolve(first, dtype="F64"), second), "has F64"),
            (
                (head, attrs.evolve(first, shape=first.shape[::-1]), second),
                r"has F32 \(4, 5, 2\) in 160 bytes",
            ),
            (
                (attrs.evolve(head, data=np.array([0, 4], "<u4").tobytes()), first, second),
                r"has F32 \(2, 4, 4\)",
            ),
            (
                (attrs.evolve(head, data=np.array([7, 4], "<u4").tobytes()), first, second),
                "says kind 7",
            ),
            (
                (attrs.evolve(head, data=np.array([1, 5], "<u4").tobytes()), first, second),
                "where this model has 0",
            ),
        ]:
            with pytest.raises(ValueError, match=told):
                stored_from(payload, self.SHAPES)


class TestMemory:
    """Buffers large enough that a copy of one would show: 8 rows of 2048 tokens, 2 MB each."""

    ROWS = 8

    LIVE = tuple(map(RowId, range(ROWS)))

    @pytest.fixture
    def engine(self, monkeypatch: pytest.MonkeyPatch) -> StepEngine:
        """Rows that decode, after 200 tokens."""
        return self.filled(200, monkeypatch)

    @pytest.fixture
    def idle(self, monkeypatch: pytest.MonkeyPatch) -> StepEngine:
        """Rows whose prompt has one more token than was prefilled."""
        return self.filled(201, monkeypatch)

    def filled(self, prompt: int, monkeypatch: pytest.MonkeyPatch) -> StepEngine:
        monkeypatch.setattr(pass_shapes, "STEP", 2048)
        engine = StepEngine(build("llama"), VOCABULARY)
        prefill = tuple(Chunk(row, 200) for row in self.LIVE)
        engine.collect(
            engine.launch(
                Plan(0, admit=tuple(admit(row, prompt) for row in self.LIVE), prefill=prefill)
            )
        )
        mx.synchronize()
        return engine

    def rise(self, engine: StepEngine, plan: Plan) -> int:
        """By how many bytes memory rose above what is held before."""
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        engine.collect(engine.launch(plan))
        mx.synchronize()
        return mx.get_peak_memory() - before

    def buffer(self, engine: StepEngine) -> int:
        return min(
            buffer.nbytes for cache in only_bank(engine).buffers.leaves for buffer in cache.buffers
        )

    @releases_late
    def test_no_buffer_is_copied_by_storing_and_restoring(self, engine: StepEngine) -> None:
        stores = tuple(Store(RowId(row), 0, (16, 16), ids(10 * row, 2)) for row in range(4))
        live, limit = self.LIVE, self.buffer(engine) // 2
        assert self.rise(engine, Plan(1, decode=live)) < limit
        assert self.rise(engine, Plan(2, store=stores, decode=live)) < limit
        tail = (Store(RowId(1), 0, (48,), ids(70, 1)),)
        assert (
            self.rise(engine, Plan(3, store=tail, drop=(RowId(2),), decode=(*live[:2], *live[3:])))
            < limit
        )
        live = (*live[:2], *live[3:])
        joined = (admit(20, 60, Restore(30, ids(0, 2))),)
        assert self.rise(engine, Plan(4, admit=joined, decode=live)) < limit
        assert self.rise(engine, Plan(5, drop=(RowId(0), RowId(20)), decode=live[1:])) < limit
        joined = (admit(21, 60, Restore(50, ids(0, 2), RowId(1))),)
        assert (
            self.rise(
                engine, Plan(6, admit=joined, decode=live[1:], prefill=(Chunk(RowId(21), 10),))
            )
            < limit
        )
        assert self.rise(engine, Plan(7, decode=(*live[1:], RowId(21)))) < limit

    @releases_late
    @pytest.mark.parametrize("name", ["llama", "gpt_oss"])
    def test_no_buffer_is_copied_while_steps_overlap(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A row stored, a row that leaves and one that restores, each launched while the step
        before still runs."""
        monkeypatch.setattr(pass_shapes, "STEP", 8192)
        order = store(name, 0, 13)
        requests = [Request([1 + row, 2, 3], 30, leave=9 if row == 2 else None) for row in range(8)]
        requests.append(Request([1, 2, 3] * 5, 5, join=11, restore=restore(order, 13)))
        driver = Watching(StepEngine(build(name), VOCABULARY), {11: {"store": (order,)}})
        driver.play(requests)
        first, *steps = driver.rises
        buffer = 8 * 8192 * 2 * 16 * 4
        assert first > buffer, "the control: this step made the buffers"
        assert max(steps) < buffer / 4, steps

    def test_the_comparison_can_fail(self, engine: StepEngine) -> None:
        """A view is enough to make the next step copy its buffer."""
        views = [cache.buffers[0][:1] for cache in only_bank(engine).buffers.leaves]
        mx.eval(views)
        assert self.rise(engine, Plan(1, decode=self.LIVE)) > self.buffer(engine) // 2

    def test_a_block_owns_its_bytes_and_gives_them_back(self, idle: StepEngine) -> None:
        mx.synchronize()
        mx.clear_cache()  # A buffer that is used again counts with the size that it had before.
        before = mx.get_active_memory()
        blocks = ids(0, 10)
        idle.collect(idle.launch(Plan(1, store=(Store(RowId(0), 0, (16,) * 10, blocks),))))
        mx.synchronize()
        held = mx.get_active_memory() - before
        idle.collect(idle.launch(Plan(2, evict=blocks[1:])))
        one = idle.blocks.nbytes
        assert held == pytest.approx(10 * one, rel=0.05)
        assert mx.get_active_memory() - before == pytest.approx(one, rel=0.05)
        idle.collect(idle.launch(Plan(3, evict=blocks[:1])))
        assert mx.get_active_memory() <= before

    def test_what_is_being_given_to_the_disk_outlives_its_eviction(self, idle: StepEngine) -> None:
        launched = idle.launch(
            Plan(1, store=(Store(RowId(0), 0, (16,), ids(0, 1)),), persist=ids(0, 1))
        )
        idle.launch(Plan(2, evict=ids(0, 1)))
        [payload] = idle.collect(launched).persisted
        mx.clear_cache()
        assert np.isfinite(np.frombuffer(payload[1].data, np.float32)).all()


def admit(row: int, tokens: int, restored: Restore | None = None) -> Admit:
    prompt = np.random.RandomState(1).randint(1, VOCABULARY, tokens).astype("<i4").tobytes()
    return Admit(RowId(row), prompt, GREEDY, None, restored)
