"""A draft model in the batch: whatever it drafts, rows say what they say without; and its KV goes
wherever theirs goes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from tests.engine.driver import Driver, Request, Row, only_bank
from tests.engine.test_drafts import foretelling
from tests.engine.test_exactness import (
    assert_equal_as_far,
    greedy_requests,
    model_of,
    seeded_requests,
)
from tests.families import build, prompts
from tests.family_configs import FAMILIES, VOCABULARY
from trouper.engine.kv.draft_rows import CHUNK
from trouper.engine.kv.model_caches import flatten
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.passes.pass_shapes import EXACT, ROUNDED
from trouper.engine.spec_decode.draft_model import FED_AT_ONCE, DraftModel
from trouper.engine.spec_decode.draft_proposals import MAX_UNREAD, DraftProposals
from trouper.engine.spec_decode.prompt_lookup import Drafting
from trouper.engine.step import StepEngine
from trouper.protocol.plans import BlockId, ProposerName, Restore, RowId, Store, ThinkingLimit
from trouper.protocol.sampling import Sampling

SMALL_BANKS = attrs.evolve(EXACT, first_bank=8, shared_tokens=16)
TOKENS = 24


def other(name: str = "llama") -> nn.Module:
    """A smaller model that says something else: two layers, and weights of its own."""
    return build(name, 99, {**FAMILIES[name], "num_hidden_layers": 2})


def requests_of(lengths: Sequence[int] = (1, 17, 40, 5), tokens: int = TOKENS) -> list[Request]:
    return [Request(prompt, tokens) for prompt in prompts(tuple(lengths))]


def plain_answers(model: nn.Module, requests: Sequence[Request]) -> list[list[int]]:
    return [row.tokens for row in Driver(StepEngine(model, VOCABULARY)).play(requests)]


def with_itself(requests: Sequence[Request], size: int = 4, **how: Any) -> tuple[list[Row], Driver]:
    """The model drafts for itself."""
    model = model_of("llama")
    engine = StepEngine(model, VOCABULARY, draft_model=model)
    driver = Driver(
        engine, allow=how.pop("allow", lambda _: size), propose=lambda _: "draft_model", **how
    )
    return driver.play(requests), driver


def assert_all_right(driver: Driver) -> None:
    assert driver.drafted
    assert [(tokens, right) for _, tokens, right in driver.drafted if right != tokens] == []


@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.long(but=("1", "4"))
def test_a_model_that_drafts_for_itself_is_always_right(size: int) -> None:
    """Also beside rows whose last drafts it has not run, whose prompts are longer, and that join
    later."""
    requests = [
        attrs.evolve(request, join=3 * place) for place, request in enumerate(requests_of())
    ]
    rows, driver = with_itself(requests, size)
    assert_all_right(driver)
    wanted = plain_answers(model_of("llama"), requests_of())
    assert [row.tokens[:TOKENS] for row in rows] == wanted


def test_it_catches_up_after_a_rest() -> None:
    rows, driver = with_itself(requests_of((9, 30)), allow=lambda step: 3 if step % 7 > 4 else 0)
    assert_all_right(driver)
    assert [row.tokens[:TOKENS] for row in rows] == plain_answers(
        model_of("llama"), requests_of((9, 30))
    )


def test_rows_that_draft_less_stop_early() -> None:
    sizes = random.Random(3)
    rows, driver = with_itself(requests_of(), allow=lambda _: sizes.choice((0, 1, 2, 7)))
    assert_all_right(driver)
    assert {1, 2, 7} <= {tokens for _, tokens, _ in driver.drafted}
    assert [row.tokens[:TOKENS] for row in rows] == plain_answers(model_of("llama"), requests_of())


def test_passes_for_longer_drafts_leave_the_others_out() -> None:
    """Rows 1 and 2 draft less than row 3: the later passes are over its slot alone."""
    model = model_of("llama")
    engine = StepEngine(model, VOCABULARY, draft_model=model)
    widths, sizes = passes_of(engine), [1, 2, 5]
    turn = iter(sizes * 99)
    driver = Driver(engine, allow=lambda _: next(turn), propose=lambda _: "draft_model")
    driver.play([Request(prompt, 40) for prompt in prompts((5, 5, 5))])
    assert_all_right(driver)
    assert (3, FED_AT_ONCE) in widths and widths.count((3, 1)) <= 1, (
        "only the first pass of a step is over all rows"
    )
    assert [width for width in widths if width[0] == 2] and [
        width for width in widths if width == (1, 1)
    ]


def play(name: str, cases: Sequence[tuple[Request, list[int]]], seed: str, **how: Any) -> Driver:
    """Joins and leaves, chunks of any size, each row's drafts now from one proposer and now from
    the other."""
    dice, draft = random.Random(seed), how.pop("draft")
    engine = StepEngine(
        model_of(name), VOCABULARY, draft_model=draft, drafting=foretelling(cases, dice, 6), **how
    )
    return play_on(engine, name, cases, dice, ("ngram", "draft_model", "draft_model"))


def play_on(
    engine: StepEngine,
    name: str,
    cases: Sequence[tuple[Request, list[int]]],
    dice: random.Random,
    names: Sequence[ProposerName],
) -> Driver:
    """Play the cases on an engine of that family. `names`: the proposers, as often as they are to
    be drawn."""
    script = []
    for request, _ in cases:
        join = dice.randrange(12)
        leave = join + dice.randrange(1, 12) if dice.random() < 1 / 4 else None
        script.append(attrs.evolve(request, join=join, leave=leave, drafts=dice.random() < 0.8))
    driver = Driver(
        engine,
        lambda step: (1, 16, 200)[step % 3],
        allow=lambda _: dice.choice((0, 1, 3, 6)),
        propose=lambda _: dice.choice(names),
    )
    rows = driver.play(script)
    got = [row.tokens[: row.request.tokens] for row in rows]
    assert_equal_as_far(name, script, got, [wanted for _, wanted in cases])
    return driver


SHAPES = {"exact": EXACT, "banks": SMALL_BANKS, "rounded": ROUNDED}


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2", "deepseek_v3", "qwen3_moe"])
@pytest.mark.long(but=("llama-*", "gpt_oss-*", "deepseek_v3-exact"))
def test_r9_f22_a_row_says_the_same_whatever_drafts(name: str, shapes: str) -> None:
    """A draft model of another architecture than most; it is wrong nearly always."""
    driver = play(
        name, greedy_requests(name), f"{name} {shapes}", draft=other(), shapes=SHAPES[shapes]
    )
    assert {0, 1} <= {right for _, _, right in driver.drafted}


def test_r9_f22_seeded_rows_too() -> None:
    cases = [*greedy_requests("llama"), *seeded_requests("llama")]
    assert play("llama", cases, "seeded", draft=model_of("llama")).drafted


def test_r9_f22_limits_of_thinking_and_penalties() -> None:
    """The draft model knows of neither, so its drafts are wrong there."""
    model = model_of("llama")
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
    rows, driver = with_itself(requests)
    assert [row.tokens[:TOKENS] for row in rows] == plain_answers(model, requests)
    assert {0, 4} <= {right for _, _, right in driver.drafted}
    assert all(row.tokens[6:9] == [310, 311, 312] for row in rows[1::2])


def copied(first: Request, second: Request, restore: Restore, **orders: Any) -> list[int]:
    """Numbers of tokens that the draft model caught up with. The second row begins with what was
    stored or copied of the first at step 6, and drafts as soon as it decodes."""
    model = model_of("llama")
    engine = StepEngine(model, VOCABULARY, draft_model=model)
    passes = list[int]()
    assert isinstance(engine._rows, SlotRows) and engine._rows.draft is not None
    prefill = engine._rows.draft.prefill

    def counted(missing: Any) -> None:
        passes.append(sum(map(len, missing.values())))
        prefill(missing)

    engine._rows.draft.prefill = counted  # type: ignore[method-assign]
    late = attrs.evolve(second, join=7, restore=restore)
    driver = Driver(
        engine,
        allow=lambda step: 4 if step > 7 else 0,
        propose=lambda _: "draft_model",
        orders={6: orders},
    )
    rows = driver.play([first, late])
    assert rows[1].tokens[: second.tokens] == plain_answers(model, [second])[0]
    mine = [(tokens, right) for row, tokens, right in driver.drafted if row == RowId(1)]
    assert mine and all(tokens == right for tokens, right in mine)
    first_row = next(place for place, (row, _, _) in enumerate(driver.drafted) if row == RowId(1))
    assert first_row < 3, "it drafts at once"
    return [tokens for tokens in passes if tokens]


def test_a_prefix_from_blocks_brings_the_draft_models_kv() -> None:
    """So after the hit the draft model runs only what the target runs."""
    [prompt] = prompts((40,))
    first = Request(prompt, 20)
    second = Request([*prompt[:32], 7, 8, 9], 12)
    store = Store(RowId(0), 0, (16, 16), (BlockId(1), BlockId(2)))
    passes = copied(first, second, Restore(32, (BlockId(1), BlockId(2))), store=(store,))
    assert passes[0] == 32, "the stored tokens were caught up in one pass"
    assert max(passes[1:]) < 32


def test_a_prefix_from_a_live_row_brings_it_too() -> None:
    [prompt] = prompts((40,))
    first = Request(prompt, 20)
    second = Request([*prompt[:30], 7, 8], 12)
    passes = copied(first, second, Restore(30, source=RowId(0)))
    assert passes[0] == 30


def passes_of(engine: StepEngine) -> list[tuple[int, ...]]:
    """Fills with the shape of each pass of the draft model."""
    assert isinstance(engine._rows, SlotRows) and engine._rows.draft is not None
    draft, widths = engine._rows.draft, list[tuple[int, ...]]()
    forward = draft._forward

    def counted(segments: Any, tokens: mx.array, *rest: Any) -> mx.array:
        widths.append(tuple(tokens.shape))
        return forward(segments, tokens, *rest)

    draft._forward = counted  # type: ignore[method-assign,assignment]
    return widths


def test_passes_are_as_many_as_draft_tokens() -> None:
    """Of all rows together, from the second draft on."""
    model = model_of("llama")
    engine = StepEngine(model, VOCABULARY, draft_model=model)
    widths = passes_of(engine)
    Driver(engine, allow=lambda _: 3, propose=lambda _: "draft_model").play(
        requests_of((5, 5, 5), 33)
    )
    steady = widths[-9:]
    assert steady == [(3, FED_AT_ONCE), (3, 1), (3, 1)] * 3


def test_kv_of_wrong_drafts_is_taken_back() -> None:
    """A row draws at random, so most drafts are wrong; what remains is what the draft model makes
    of the row's tokens."""
    model = model_of("llama")
    engine = StepEngine(model, VOCABULARY, draft_model=model)
    [request], seen = (
        [attrs.evolve(requests_of((12,))[0], sampling=seeded_requests("llama")[0][0].sampling)],
        [],
    )
    assert isinstance(engine._rows, SlotRows) and engine._rows.draft is not None
    rows, draft = engine._rows, engine._rows.draft

    class Watching(Driver):
        def _read(self, stepped: Any, by_id: Any) -> None:
            super()._read(stepped, by_id)
            if stepped.drafted and RowId(0) in draft.lengths:
                engine.proposals._feed_proposers()
                length = draft.lengths[RowId(0)]
                parts = rows.copies.read(RowId(0), 0, min(length, rows.length(RowId(0))))
                seen.append([np.array(part) for part in parts])

    driver = Watching(engine, allow=lambda _: 3, propose=lambda _: "draft_model")
    driver.play([request])
    assert any(right < tokens for _, tokens, right in driver.drafted)
    assert len(seen) > 4
    for parts in seen:
        half = len(parts) // 2
        for target, drafted in zip(parts[:half], parts[half:], strict=True):
            np.testing.assert_allclose(drafted, target, atol=1e-3)


def test_a_row_says_what_was_cut_from_its_draft() -> None:
    """As where a grammar allows the end of a turn and nothing more: the token that the next draft
    begins with has been drafted."""
    model = model_of("llama")
    engine = StepEngine(model, VOCABULARY, draft_model=model)
    drafts = engine.proposals.drafts
    engine.proposals.drafts = lambda *sizes: {row: [] for row in drafts(*sizes)}  # type: ignore[method-assign]
    [request] = requests_of((9,))
    rows = Driver(engine, allow=lambda _: 3, propose=lambda _: "draft_model").play([request])
    assert rows[0].tokens == plain_answers(model, [request])[0]


def test_a_prefill_is_ready_when_the_targets_pass_is() -> None:
    """It is known by the last array, which must not be one that the pass left alone: the time of a
    chunk is measured by it."""
    model = model_of("llama")
    engine = StepEngine(model, VOCABULARY, draft_model=other())
    driver, seen = Driver(engine, allow=lambda _: 2, propose=lambda _: "draft_model"), list[bool]()
    begin = engine._rows.prefill

    def prefilled(chunks: Any) -> Any:
        done = begin(chunks)
        if chunks:
            buffers = only_bank(engine).buffers
            seen.append(buffers.state()[-1] is flatten(buffers.caches)[-1].buffers[-1])
        return done

    engine._rows.prefill = prefilled  # type: ignore[method-assign]
    driver.play(
        [
            attrs.evolve(request, join=3 * place)
            for place, request in enumerate(requests_of((40, 30), 9))
        ]
    )
    assert seen and all(seen)


def test_each_row_is_asked_of_the_proposer_that_the_plan_names() -> None:
    asked = dict[RowId, int]()

    class Asked(DraftModel):
        def __init__(self) -> None:
            """Without a model."""

        def open(self, row: RowId, prompt: Sequence[int], restored: int) -> None: ...

        def append(self, tokens: Mapping[RowId, Sequence[int]]) -> None: ...

        def drafts(self, requests: Mapping[RowId, int]) -> dict[RowId, list[int]]:
            asked.update(requests)
            return {key: [77] for key in requests}

    proposals = DraftProposals(Drafting(min_ngram=2), Asked())
    repeating = [1, 2, 3, 1, 2]
    rows = [RowId(place) for place in range(3)]
    for row in rows:
        proposals.open(row, repeating)
    drafts = proposals.drafts(
        {rows[0]: 1, rows[1]: 1, rows[2]: 0}, {rows[1]: "draft_model", rows[2]: "draft_model"}
    )
    assert drafts == {rows[0]: [3], rows[1]: [77]}
    assert asked == {rows[1]: 1}


def test_tokens_that_nobody_asks_for_are_not_kept() -> None:
    proposals = DraftProposals(Drafting())
    proposals.open(RowId(0), [1, 2, 3])
    for step in range(2 * MAX_UNREAD):
        proposals.append((RowId(0),), (step,))
    assert len(proposals._unread) <= MAX_UNREAD


def test_long_prompts_are_caught_up_in_chunks() -> None:
    [prompt] = prompts((2 * CHUNK + 9,))
    request = Request(prompt, 12)
    rows, driver = with_itself([request])
    assert_all_right(driver)
    assert rows[0].tokens[:12] == plain_answers(model_of("llama"), [request])[0]
