"""Draft models that cannot run all that their target can: a shorter context, other numbers of
logits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from tests.engine.driver import Driver, Request, Row
from tests.engine.test_draft_model import (
    SHAPES,
    TOKENS,
    assert_all_right,
    plain_answers,
    requests_of,
)
from tests.engine.test_exactness import model_of
from tests.families import build, prompts
from tests.family_configs import FAMILIES, VOCABULARY
from tests.real.test_preemption import fine_capacities
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.spec_decode.draft_model import DraftLimits
from trouper.engine.step import StepEngine
from trouper.protocol.plans import BlockId, Restore, RowId, Store

CONTEXT = 48
SHORT = DraftLimits(context=CONTEXT)


class Seen:
    """Maximum length of any row in the draft model, after any of its passes."""

    def __init__(self, engine: StepEngine) -> None:
        assert isinstance(engine._rows, SlotRows) and engine._rows.draft is not None
        self.longest, draft = 0, engine._rows.draft
        forward = draft._forward

        def watched(*how: Any) -> mx.array:
            outputs = forward(*how)
            self.longest = max(self.longest, *draft.lengths.values())
            return outputs

        draft._forward = watched  # type: ignore[method-assign,assignment]


def with_itself(
    requests: Sequence[Request], limits: DraftLimits, **how: Any
) -> tuple[list[Row], Driver, Seen]:
    model = model_of("llama")
    engine = StepEngine(
        model, VOCABULARY, draft_model=model, draft_limits=limits, shapes=how.pop("shapes", None)
    )
    seen = Seen(engine)
    driver = Driver(
        engine, allow=how.pop("allow", lambda _: 5), propose=lambda _: "draft_model", **how
    )
    return driver.play(requests), driver, seen


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.long(but=("exact", "banks"))
def test_rows_have_no_drafts_behind_the_context(shapes: str) -> None:
    """Rows that begin before it, at its very end and behind it, beside each other."""
    requests = [
        attrs.evolve(request, join=3 * place)
        for place, request in enumerate(requests_of((1, 30, CONTEXT - 1, CONTEXT, 90), 30))
    ]
    rows, driver, seen = with_itself(requests, SHORT, shapes=SHAPES[shapes])
    assert [row.tokens[:30] for row in rows] == plain_answers(model_of("llama"), requests)
    assert_all_right(driver)
    assert {row for row, _, _ in driver.drafted} == {RowId(0), RowId(1), RowId(2)}
    assert seen.longest == CONTEXT, "and not one position is left out before it"


def test_the_last_draft_ends_one_behind_the_context() -> None:
    """Its last token is drafted, and never run."""
    [request] = requests_of((CONTEXT - 4,), 12)
    _, driver, _ = with_itself([request], SHORT, allow=lambda _: 16)
    assert [(tokens, right) for _, tokens, right in driver.drafted] == [(4, 4)]


def test_what_is_copied_behind_the_context_is_harmless() -> None:
    """A block reaches beyond the draft model's context: rows that begin with it, or with a part of
    it, are as they should be."""
    [prompt] = prompts((40,))
    answer = plain_answers(model_of("llama"), [Request(prompt, 50)])[0]
    store = Store(RowId(0), 0, (32, 48), (BlockId(1), BlockId(2)))
    beyond = Request(
        [*prompt, *answer[:40], 7], 12, join=46, restore=Restore(80, (BlockId(1), BlockId(2)))
    )
    before = Request([*prompt[:32], 7, 8], 12, join=46, restore=Restore(32, (BlockId(1),)))
    requests = [Request(prompt, 50), beyond, before]
    # So that the answer is longer than the buffers of the draft model, which nothing fills.
    with fine_capacities():
        rows, driver, seen = with_itself(
            requests, SHORT, orders={45: {"store": (store,)}}, allow=lambda step: 5 * (step > 45)
        )
    plain = [attrs.evolve(request, join=0, restore=None) for request in requests]
    assert [row.tokens[: row.request.tokens] for row in rows] == plain_answers(
        model_of("llama"), plain
    )
    assert_all_right(driver)
    assert {row for row, _, _ in driver.drafted} == {RowId(2)}
    assert seen.longest <= CONTEXT


def llama(vocabulary: int, padding: float = 0.0) -> nn.Module:
    """The llama of the tests with more tokens. `padding`: factor of the rows of its output layer
    for them."""
    model: Any = build("llama", 99, {**FAMILIES["llama"], "vocab_size": vocabulary})
    own: Any = model_of("llama")
    model.model.layers, model.model.norm = own.model.layers, own.model.norm
    for layer, usual, factor in (
        (model.model.embed_tokens, own.model.embed_tokens, 1.0),
        (model.lm_head, own.lm_head, padding),
    ):
        layer.weight = mx.concatenate([usual.weight, layer.weight[VOCABULARY:] * factor])
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("padding", [0.0, 1.0])
def test_a_draft_model_with_more_logits(padding: float) -> None:
    """Padding that is never likely, as it is trained; and padding that the draft model says at
    times, of which the target knows nothing: drafts end before it."""
    model = model_of("llama")
    limits = DraftLimits(num_tokens=640, target_tokens=VOCABULARY)
    engine = StepEngine(model, VOCABULARY, draft_model=llama(640, padding), draft_limits=limits)
    driver = Driver(engine, allow=lambda _: 5, propose=lambda _: "draft_model")
    rows = driver.play(requests_of())
    assert [row.tokens[:TOKENS] for row in rows] == plain_answers(model, requests_of())
    sizes = {tokens for _, tokens, _ in driver.drafted}
    if padding:
        assert sizes > {1, 2, 5}, "some are cut"
    else:
        assert_all_right(driver)


def test_a_draft_model_with_fewer_logits() -> None:
    """Tokens that it does not know are in prompts and answers: it runs others in their place, and
    none beyond its embeddings."""
    target, dice = llama(640, 1.0), random.Random(3)
    requests = [
        attrs.evolve(request, prompt=[dice.randrange(640) for _ in request.prompt])
        for request in requests_of((9, 17, 40, 5), 60)
    ]
    plain = [row.tokens for row in Driver(StepEngine(target, 640)).play(requests)]
    assert np.max([max(tokens) for tokens in plain]) >= VOCABULARY
    limits = DraftLimits(num_tokens=VOCABULARY, target_tokens=640)
    engine = StepEngine(target, 640, draft_model=model_of("llama"), draft_limits=limits)
    highest = 0
    assert isinstance(engine._rows, SlotRows) and engine._rows.draft is not None
    forward = engine._rows.draft._forward

    def watched(segments: Any, tokens: mx.array, *rest: Any) -> mx.array:
        nonlocal highest
        highest = max(highest, int(np.array(tokens).max()))
        return forward(segments, tokens, *rest)

    engine._rows.draft._forward = watched  # type: ignore[method-assign,assignment]
    driver = Driver(engine, allow=lambda _: 4, propose=lambda _: "draft_model")
    rows = driver.play(requests)
    assert [row.tokens[:60] for row in rows] == [tokens[:60] for tokens in plain]
    assert driver.drafted and highest == VOCABULARY - 1
