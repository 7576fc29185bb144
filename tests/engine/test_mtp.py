"""An MTP head in the batch: whatever it drafts, rows say what they say without; and it drafts what
it would say alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from tests.engine.driver import GREEDY, Driver, Request
from tests.engine.test_draft_model import SHAPES, SMALL_BANKS, other, play_on
from tests.engine.test_drafts import foretelling
from tests.engine.test_exactness import greedy_requests, seeded_requests
from tests.families import prompts
from tests.family_configs import FAMILIES, HIDDEN, VOCABULARY
from tests.heads import SOME_HEADS, Kind, save_with_head
from trouper.engine.kv.head_rows import HELD_PASSES, max_held_positions
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.passes.pass_shapes import of_device
from trouper.engine.spec_decode.draft_model import MtpHead
from trouper.engine.step import StepEngine
from trouper.protocol.plans import (
    Admit,
    BlockId,
    Chunk,
    Plan,
    ProposerName,
    Restore,
    RowId,
    Store,
    ThinkingLimit,
)
from trouper.protocol.sampling import Sampling
from trouper.protocol.settings import Settings

TOKENS = 24
CLOSE = 1e-3
"""Difference of two logits that rounding may turn round."""
MEASURED = [name for name in SOME_HEADS if name in FAMILIES]
"""Families of which the tests know what the model alone says."""
every_family = pytest.mark.parametrize("name", SOME_HEADS)
every_measured_family = pytest.mark.parametrize("name", MEASURED)
Reaction = Callable[[Mapping[RowId, Sequence[int]], dict[RowId, list[int]]], None]


def loaded(name: str, kind: Kind = "random") -> EvaluatedModel:
    """One model for each kind: a head is that of the very modules with which rows are computed."""
    return _loaded(name, kind)


@cache
def _loaded(name: str, kind: Kind) -> EvaluatedModel:
    with TemporaryDirectory() as directory:
        return load(
            Settings(model=str(save_with_head(name, Path(directory), kind)), no_ssd=True),
            lambda _: None,
        )


def head_of(name: str, kind: Kind = "random") -> MtpHead:
    head = loaded(name, kind).head
    assert head is not None
    return head


def engine_of(name: str, kind: Kind = "random", **how: Any) -> StepEngine:
    capabilities = loaded(name, kind).card.capabilities
    if how.get("shapes") is not None and not capabilities.allows("banks"):
        how["shapes"] = attrs.evolve(how["shapes"], first_bank=4096)
    return StepEngine(
        loaded(name, kind).model,
        VOCABULARY,
        head=head_of(name, kind),
        capabilities=capabilities,
        **how,
    )


def requests_of(lengths: Sequence[int] = (1, 17, 40, 5), tokens: int = TOKENS) -> list[Request]:
    return [Request(prompt, tokens) for prompt in prompts(tuple(lengths))]


def plain_answers(name: str, requests: Sequence[Request], kind: Kind = "random") -> list[list[int]]:
    return [
        row.tokens
        for row in Driver(StepEngine(loaded(name, kind).model, VOCABULARY)).play(requests)
    ]


def by_head(engine: StepEngine, size: int = 4, **how: Any) -> Driver:
    """Rows draft by the head alone."""
    return Driver(engine, allow=how.pop("allow", lambda _: size), propose=lambda _: "mtp", **how)


def assert_all_right(driver: Driver) -> None:
    assert driver.drafted
    assert [(tokens, right) for _, tokens, right in driver.drafted if right != tokens] == []


@every_family
@pytest.mark.parametrize("kind", ["of embeddings", "of states"])
@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.long(
    but=("1-of states-qwen3_5", "5-of embeddings-deepseek_v3", "5-of embeddings-mimo")
)
def test_a_perfect_head_is_always_right(name: str, kind: Kind, size: int) -> None:
    """Also beside rows that join later; the one needs the right token at each position, the other
    the right hidden state."""
    requests = [
        attrs.evolve(request, join=3 * place) for place, request in enumerate(requests_of())
    ]
    driver = by_head(engine_of(name, kind), size)
    rows = driver.play(requests)
    assert_all_right(driver)
    assert [row.tokens[:TOKENS] for row in rows] == plain_answers(name, requests_of(), kind)
    assert rows[0].tokens[:3] == [(requests[0].prompt[-1] % HIDDEN + n) % HIDDEN for n in (1, 2, 3)]


@every_measured_family
@pytest.mark.long(but=("deepseek_v3",))
def test_it_catches_up_after_a_rest(name: str) -> None:
    driver = by_head(
        engine_of(name, "of states"), allow=lambda step: 3 if step % (HELD_PASSES + 9) > 36 else 0
    )
    rows = driver.play(requests_of((9, 30), 120))
    assert_all_right(driver)
    assert [row.tokens[:120] for row in rows] == plain_answers(
        name, requests_of((9, 30), 120), "of states"
    )


# -- drafts are what the head says ---------------------------------------------------------------


def said_alone(head: MtpHead, tokens: Sequence[int], size: int) -> tuple[list[int], float]:
    """What the head drafts after these tokens, by one pass over all of them and no slots; and the
    smallest difference of two best logits."""
    states = head.target_states(mx.array([tokens]), None)[:, :-1]
    following, gap, said = list(tokens[1:]), np.inf, []
    for _ in range(size):
        out = head(mx.array([following]), states)
        best = np.sort(np.array(head.logits_of(out[:, -1:])[0, 0].astype(mx.float32)))
        gap = min(gap, float(best[-1] - best[-2]))
        said.append(int(mx.argmax(head.logits_of(out[:, -1:])[0, 0]).item()))  # type: ignore[arg-type]
        states = mx.concatenate([states, out[:, -1:]], axis=1)
        following.append(said[-1])
    return said, gap


def watching(engine: StepEngine, react: Reaction) -> None:
    """Pass on the known tokens of each row that drafts, and its draft."""
    rows = engine._rows
    assert isinstance(rows, SlotRows) and rows.head is not None
    head, draft = rows.head, rows.head.draft

    def watched(sizes: Any, *how: Any) -> Any:
        drafts = draft(sizes, *how)
        react({row: tuple(head.tokens[row]) for row in drafts}, drafts)
        return drafts

    head.draft = watched  # type: ignore[method-assign,assignment]


class Comparing:
    """Compares each draft with what the head says alone."""

    def __init__(self, name: str) -> None:
        self.name, self.same, self.others = name, 0, list[tuple[Any, ...]]()

    def __call__(
        self, tokens: Mapping[RowId, Sequence[int]], drafts: dict[RowId, list[int]]
    ) -> None:
        for row, draft in drafts.items():
            said, gap = said_alone(head_of(self.name), tokens[row], len(draft))
            if said == draft or gap < CLOSE:
                self.same += 1
            else:
                self.others.append((row, len(tokens[row]), said, draft, gap))


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        (name, shapes)
        for name in SOME_HEADS
        for shapes in SHAPES
        if name in FAMILIES or shapes == "banks"
    ],
)
@pytest.mark.long(but=("deepseek_v3-banks", "qwen3_5-rounded"))
def test_it_drafts_what_it_says_alone(name: str, shapes: str) -> None:
    """From every hidden state of the row so far: after prompts in chunks, wrong drafts, rests,
    other company and other banks."""
    dice, engine = random.Random(f"{name} {shapes}"), engine_of(name, shapes=SHAPES[shapes])
    watching(engine, comparing := Comparing(name))
    driver = by_head(
        engine, chunk=lambda step: (1, 16, 200)[step % 3], allow=lambda _: dice.choice((0, 1, 3))
    )
    seeded = [request for request, _ in seeded_requests(name if name in FAMILIES else "llama")][:3]
    requests = [
        attrs.evolve(request, join=dice.randrange(9)) for request in (*requests_of(), *seeded)
    ]
    driver.play(requests)
    assert comparing.same > 50 and not comparing.others


def play(name: str, cases: Sequence[tuple[Request, list[int]]], seed: str, **how: Any) -> Driver:
    """Joins and leaves, chunks of any size, each row's drafts now from one proposer and now from
    another."""
    dice = random.Random(seed)
    engine = engine_of(name, drafting=foretelling(cases, dice, 6), **how)
    names: list[ProposerName] = ["ngram", "mtp", "mtp"]
    if how.get("draft_model"):
        names.append("draft_model")
    return play_on(engine, name, cases, dice, names)


@every_measured_family
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.long(but=("exact-deepseek_v3", "rounded-qwen3_5", "banks-deepseek_v3"))
def test_r9_f22_a_row_says_the_same_with_a_head(name: str, shapes: str) -> None:
    driver = play(
        name,
        [*greedy_requests(name), *seeded_requests(name)],
        f"{name} {shapes}",
        shapes=SHAPES[shapes],
    )
    assert {0, 1} <= {right for _, _, right in driver.drafted}


def test_r9_f22_beside_a_draft_model() -> None:
    play("qwen3_5", greedy_requests("qwen3_5"), "both", draft_model=other(), shapes=SMALL_BANKS)


@every_family
def test_r9_f22_limits_of_thinking_and_penalties(name: str) -> None:
    limit = ThinkingLimit(6, (300, 301), (310, 311, 312), begun=True)
    shaped = Sampling(temperature=0, presence_penalty=1.5, logit_bias=((7, 4.0),))
    requests = [
        attrs.evolve(
            request,
            thinking=limit if place % 2 else None,
            sampling=shaped if place > 1 else request.sampling,
        )
        for place, request in enumerate(requests_of((9, 17, 40, 5)))
    ]
    driver = by_head(engine_of(name, "of embeddings"))
    rows = driver.play(requests)
    assert [row.tokens[:TOKENS] for row in rows] == plain_answers(name, requests, "of embeddings")
    assert {0, 4} <= {right for _, _, right in driver.drafted}
    assert all(row.tokens[6:9] == [310, 311, 312] for row in rows[1::2])


# -- KV that goes where the model's goes ---------------------------------------------------------


def drafts_after(
    first: Request, second: Request, restore: Restore, **orders: Any
) -> tuple[list[Any], Comparing]:
    """Drafts of a second row that begins with what was stored or copied of the first at step 6."""
    engine, comparing = engine_of("deepseek_v3"), Comparing("deepseek_v3")
    late = attrs.evolve(second, join=7, restore=restore)
    allow = by_head(engine, allow=lambda step: 4 if step > 7 else 0, orders={6: orders})
    watching(engine, lambda tokens, drafts: comparing(_only(tokens), _only(drafts)))
    rows = allow.play([first, late])
    assert rows[1].tokens[: second.tokens] == plain_answers("deepseek_v3", [second])[0]
    return [drafted for drafted in allow.drafted if drafted[0] == RowId(1)], comparing


def _only(by_row: Mapping[RowId, Any]) -> dict[RowId, Any]:
    return {row: value for row, value in by_row.items() if row == RowId(1)}


STORE = Store(RowId(0), 0, (16, 16), (BlockId(1), BlockId(2)))


def test_a_prefix_from_blocks_brings_the_heads_kv() -> None:
    [prompt] = prompts((40,))
    # It goes on with the token that the first row went on with.
    second = Request([*prompt[:33], 7, 8, 9], 12)
    drafted, comparing = drafts_after(
        Request(prompt, 20), second, Restore(32, (BlockId(1), BlockId(2))), store=(STORE,)
    )
    assert drafted and comparing.same > 3 and not comparing.others


def test_a_prefix_from_a_live_row_brings_it_too() -> None:
    [prompt] = prompts((40,))
    second = Request([*prompt[:31], 7, 8], 12)
    drafted, comparing = drafts_after(Request(prompt, 20), second, Restore(30, source=RowId(0)))
    assert drafted and comparing.same > 3 and not comparing.others


def test_a_block_that_ends_with_the_row_has_kv_of_the_head_to_its_end() -> None:
    """The token behind it may be unknown yet."""
    [prompt] = prompts((30,))
    first = Request(prompt, 20)
    engine = engine_of("deepseek_v3")
    # At step 7 the row has 36 tokens in its KV.
    store = Store(RowId(0), 0, (16, 20), (BlockId(1), BlockId(2)))
    rows, launch, known = engine._rows, engine.launch, list[bool]()
    assert isinstance(rows, SlotRows) and rows.head is not None
    head = rows.head

    def launched(plan: Any) -> Any:
        step = launch(plan)
        if plan.store:
            known.append(head.lengths[RowId(0)] < len(head.tokens[RowId(0)]))
        return step

    engine.launch = launched  # type: ignore[method-assign]
    by_head(engine, allow=lambda _: 0, orders={7: {"store": (store,)}}).play([first])
    assert known == [True], "for the row itself a guessed token does not count"
    shapes = engine.blocks._layout
    stored = shapes.unpack(list(engine.blocks._stored[BlockId(2)].arrays))
    assert len(stored) == len(shapes.sliceable)
    for part in stored[-2:]:
        assert np.abs(np.array(part)).max(axis=(0, 2)).all(), "no token was left out"


def test_hidden_states_of_rows_that_rest_are_few() -> None:
    engine = engine_of("deepseek_v3")
    rows = engine._rows
    assert isinstance(rows, SlotRows) and rows.head is not None
    head, most = rows.head, 0
    launch = engine.launch

    def launched(plan: Any) -> Any:
        nonlocal most
        step = launch(plan)
        most = max(
            most, *(sum(held.stop - held.start for held in row) for row in head._held.values()), 0
        )
        return step

    engine.launch = launched  # type: ignore[method-assign]
    Driver(engine).play(requests_of((300, 5), 100))
    assert HELD_PASSES < most <= HELD_PASSES + 3
    assert not head._held and not head.tokens and not head.lengths


@pytest.mark.parametrize("chunk", [16, 200])
@pytest.mark.long(but=("200",))
def test_bytes_of_hidden_states_are_counted(chunk: int) -> None:
    """Rows rest from the head, while wrong drafts by n-grams make passes wide, of which all is
    held; and prompts have small chunks."""
    cases = greedy_requests("deepseek_v3")
    engine = engine_of("deepseek_v3", drafting=foretelling([], random.Random(3), 8))
    rows, kv = engine._rows, loaded("deepseek_v3").card.kv
    assert isinstance(rows, SlotRows) and rows.head is not None
    head, launch, held, most = rows.head, engine.launch, list[float](), 16
    assert kv.head_state_bytes == max_held_positions(of_device().width(1 + most)) * HIDDEN * 4
    assert (
        kv.row_bytes(1) == attrs.evolve(kv, head_state_bytes=0).row_bytes(1) + kv.head_state_bytes
    )
    wrong = {row: [7] * most for row in map(RowId, range(len(cases)))}
    engine.proposals.given = wrong

    def launched(plan: Any) -> Any:
        step = launch(plan)
        arrays = {
            id(each.states): each.states.nbytes for row in head._held.values() for each in row
        }
        if not plan.prefill:
            held.append(sum(arrays.values()) / (kv.head_state_bytes * max(1, len(head._held))))
        return step

    engine.launch = launched  # type: ignore[method-assign]
    Driver(engine, chunk, allow=lambda _: most).play(
        [attrs.evolve(request, tokens=60) for request, _ in cases]
    )
    assert 0.6 < max(held) <= 1


def test_hidden_states_of_prompts_that_are_scored_are_few() -> None:
    """Such prompts run alone."""
    engine = engine_of("deepseek_v3")
    rows = engine._rows
    assert isinstance(rows, SlotRows) and rows.head is not None
    row, prompt = RowId(0), prompts((200,))[0]
    admit = Admit(row, np.array(prompt, "<i4").tobytes(), GREEDY, prompt_logprobs=1)
    for step, plan in enumerate(
        (Plan(0, admit=(admit,), prefill=(Chunk(row, 150),)), Plan(1, prefill=(Chunk(row, 9),)))
    ):
        engine.collect(engine.launch(plan))
        held = rows.head._held[row]
        assert sum(each.stop - each.start for each in held) == (150, 10)[step]
    assert held[-1].stop == 159
    engine.collect(engine.launch(Plan(2, drop=(row,))))
    assert not rows.head._behind
