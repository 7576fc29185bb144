"""F19, F20: a rank whose state is not what a plan expects says which part of it, before it launches
anything."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import cast

import attrs
import numpy as np
import pytest

from tests.arithmetic import assert_tokens
from tests.engine.driver import Driver, Request, only_bank
from tests.engine.test_drafts import foretelling
from tests.engine.test_exactness import engine_of, greedy_requests, model_of, random_script
from tests.families import prompts
from tests.family_configs import VOCABULARY
from trouper.engine.distributed.state_digests import Digests
from trouper.engine.step import Launched, StepEngine
from trouper.protocol.plans import Admit, BlockId, Chunk, Plan, RowId, Stepped, Store
from trouper.protocol.ranks import Digest, RankDiffers, ids_of, pairs
from trouper.protocol.sampling import Sampling

GREEDY = Sampling(temperature=0)
ONE, TWO = RowId(1), RowId(2)


class Pair:
    """A rank that leads, and one that follows: each plan carries what the first has."""

    def __init__(self, name: str) -> None:
        self.first, self.second = engine_of(name), engine_of(name)
        self.settled = -1
        self._step = 0

    def take(self, **fields: object) -> tuple[Stepped, Stepped]:
        """One step, read at once."""
        plan = Plan(self._step, **fields, digest=self.first._digests.now(self.settled))  # type: ignore[arg-type]
        self._step += 1
        both = tuple(engine.collect(engine.launch(plan)) for engine in (self.first, self.second))
        self.settled = plan.step
        return both  # type: ignore[return-value]


def admit(row: RowId, length: int) -> Admit:
    return Admit(row, np.array(prompts((length,))[0], "<i4").tobytes(), GREEDY)


@pytest.fixture
def pair() -> Pair:
    """Two rows decode; a block is stored."""
    pair = Pair("llama")
    pair.take(admit=(admit(ONE, 5), admit(TWO, 9)), prefill=(Chunk(ONE, 5), Chunk(TWO, 9)))
    pair.take(decode=(ONE, TWO), store=(Store(ONE, 0, (4,), (BlockId(7),)),))
    return pair


def test_f20_numbers_of_steps_may_jump(pair: Pair) -> None:
    """A plan that has nothing to do is not sent, but has its number. The step that the next two
    plans settle on was forgotten when the first of these was eight numbers later: the group ended
    for no reason (world 163 at two ranks)."""
    settled = pair.settled
    pair._step += 7
    pair.take(decode=(ONE, TWO))
    pair.settled = settled
    pair.take(decode=(ONE, TWO))


def test_equal_ranks_say_the_same(pair: Pair) -> None:
    first, second = pair.take(decode=(ONE, TWO))
    assert (first.order, first.tokens_hash) == (second.order, second.tokens_hash) != (0, 0)
    pair.take(drop=(ONE, TWO), evict=(BlockId(7),))
    assert pair.first._digests.now(pair.settled) == pair.second._digests.now(pair.settled)


def without_a_row(engine: StepEngine) -> None:
    engine._drop([TWO])


def longer_by_one(engine: StepEngine) -> None:
    only_bank(engine).slots.lengths[0] += 1


def without_a_block(engine: StepEngine) -> None:
    engine.blocks.evict([BlockId(7)])


def in_other_slots(engine: StepEngine) -> None:
    engine._digests._settled = {
        step: (order + 1, said) for step, (order, said) in engine._digests._settled.items()
    }


def with_another_token(engine: StepEngine) -> None:
    engine._digests._settled = {
        step: (order, said + 1) for step, (order, said) in engine._digests._settled.items()
    }


@pytest.mark.parametrize(
    ("field", "planted"),
    [
        ("rows", without_a_row),
        ("lengths", longer_by_one),
        ("blocks", without_a_block),
        ("order", in_other_slots),
        ("tokens", with_another_token),
    ],
)
def test_f19_f20_what_differs_is_named_before_anything_is_done(
    pair: Pair, field: str, planted: Callable[[StepEngine], None]
) -> None:
    planted(pair.second)
    before = pair.second.lengths()
    with pytest.raises(RankDiffers) as caught:
        pair.take(decode=(ONE, TWO))
    assert (caught.value.field, caught.value.step) == (field, 2)
    assert pair.second.lengths() == before, "it was not launched"


def test_a_step_that_the_plan_counts_on_is_read_first() -> None:
    """Rank 0 may have read a step that this rank has not: then the plan says more of it than this
    rank knows yet."""
    pair = Pair("llama")
    pair.take(admit=(admit(ONE, 5),), prefill=(Chunk(ONE, 5),))
    plan = Plan(1, decode=(ONE,), digest=pair.first._digests.now(0))
    pair.first.collect(pair.first.launch(plan))
    pair.second.launch(plan)
    following = Plan(2, decode=(ONE,), digest=pair.first._digests.now(1))
    pair.second.collect(pair.second.launch(following))


@attrs.define
class Twin:
    """Two engines as one: each plan goes to both, with what the first has."""

    first: StepEngine
    second: StepEngine
    settled: int = -1

    def launch(self, plan: Plan) -> tuple[Launched, Launched]:
        plan = attrs.evolve(plan, digest=self.first._digests.now(self.settled))
        return self.first.launch(plan), self.second.launch(plan)

    def collect(self, launched: tuple[Launched, Launched]) -> Stepped:
        one, two = self.first.collect(launched[0]), self.second.collect(launched[1])
        assert (one.tokens, one.order, one.tokens_hash) == (two.tokens, two.order, two.tokens_hash)
        self.settled = one.step
        return one

    def lengths(self) -> dict[RowId, int]:
        return self.first.lengths()

    @property
    def nbytes(self) -> int:
        return self.first.nbytes


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "jamba"])
@pytest.mark.long(but=("llama", "gpt_oss"))
def test_f19_any_script_leaves_equal_ranks_equal(name: str) -> None:
    """With every kind of cache."""
    requests: list[Request] = [request for request, _ in greedy_requests(name)]
    _, script, chunk = random_script(requests, random.Random(name))
    Driver(Twin(engine_of(name), engine_of(name)), chunk).play(script)  # type: ignore[arg-type]


class OfTwins(Driver):
    def _read_already(self, launched: Launched) -> Stepped | None:
        both = cast(tuple[Launched, Launched], launched)
        assert (both[0].stepped is None) == (both[1].stepped is None)
        return both[0].stepped


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_5"])
def test_r8_r9_drafts_leave_equal_ranks_equal(name: str) -> None:
    """What is drafted follows from tokens, so both draft the same. A plan that was sent before its
    sender knew what came of a step's drafts counts one token for that step."""
    cases = greedy_requests(name)
    ranks = [
        StepEngine(model_of(name), VOCABULARY, drafting=foretelling(cases, random.Random(name), 5))
        for _ in range(2)
    ]
    dice = random.Random(name)
    driver = OfTwins(Twin(*ranks), allow=lambda _: dice.choice((0, 2, 5)))  # type: ignore[arg-type]
    rows = driver.play([attrs.evolve(request, drafts=True) for request, _ in cases])
    for row, (request, wanted) in zip(rows, cases, strict=True):
        tokens = row.tokens[: row.request.tokens]
        assert len(tokens) == len(wanted)
        assert_tokens(model_of(name), request.prompt, request.sampling, tokens, wanted)
    assert sum(right for _, _, right in driver.drafted) > 10


@attrs.define
class Held:
    """As far as digests ask: rows and how long they are."""

    order: list[RowId]
    decoding: list[RowId]
    held: dict[RowId, int]

    def lengths(self) -> dict[RowId, int]:
        return dict(self.held)


def test_only_drafts_that_the_plan_does_not_know_of_are_taken_back() -> None:
    rows = Held([ONE, TWO], [ONE], {ONE: 9, TWO: 4})
    digests = Digests(rows, None)  # type: ignore[arg-type]
    digests.settle(Stepped(0, (ONE,), (5,)), 7)
    digests.settle(
        Stepped(1, (ONE, ONE, ONE), (5, 6, 7), drafted=((ONE, 4, 2), (RowId(3), 2, 1))), 8
    )
    ids = ids_of([ONE, TWO])
    assert digests.now(0).lengths == pairs(ids, np.array([7, 4]))
    assert digests.now(1).lengths == pairs(ids, np.array([9, 4]))
    assert digests.now(1).rows == pairs(ids, np.array([1, 0]))
    assert (digests.now(0).order, digests.now(1).order) == (7, 8)


def test_a_token_that_differed_is_never_forgotten() -> None:
    said = []
    for first in (5, 6):
        digests = Digests(Held([], [], {}), None)  # type: ignore[arg-type]
        digests.settle(Stepped(0, (ONE,), (first,)), 0)
        said.append(digests.settle(Stepped(1, (ONE,), (7,)), 0).tokens_hash)
    assert said[0] != said[1]


def test_an_engine_begins_with_nothing() -> None:
    assert Digest(0, 0, 0) == engine_of("llama")._digests.now(-1)
