"""A bound on thinking: the row ends it itself, in the batch, and nobody else hears of it."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.driver import Request, answers
from tests.families import build, prompts
from tests.family_configs import VOCABULARY
from trouper import Sampling
from trouper.engine.sampling.row_state import ThinkingRule
from trouper.engine.step import StepEngine
from trouper.protocol.plans import ThinkingLimit

START, END = (300, 301), (310, 311, 312)
LIMIT = ThinkingLimit(6, START, END, begun=True)


def following(rule: ThinkingRule, drawn: int = 0) -> list[int] | None:
    """The tokens that may come next, after `drawn` tokens; None: all."""
    mask = rule.allowed(drawn)
    if (mask == 255).all():
        return None
    return [token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1]


def took(rule: ThinkingRule, *tokens: int) -> ThinkingRule:
    for token in tokens:
        assert rule.accept(token) == ""
    return rule


def test_the_end_is_written_when_the_budget_is_used() -> None:
    rule = took(ThinkingRule(LIMIT, VOCABULARY), 1, 2, 3, 4, 5)
    assert following(rule) is None
    for token in (6, *END):
        took(rule, token)
        wanted = {6: 310, 310: 311, 311: 312}.get(token)
        assert following(rule) == (None if wanted is None else [wanted])


def test_an_end_that_was_begun_is_gone_on_with() -> None:
    rule = took(ThinkingRule(LIMIT, VOCABULARY), 1, 2, 3, 4, 310, 311)
    assert following(rule) == [312]


def test_who_does_not_think_is_free() -> None:
    rule = took(ThinkingRule(attrs.evolve(LIMIT, begun=False), VOCABULARY), *range(100))
    assert following(rule) is None
    assert following(took(rule, *START, *range(6))) == [310]


def test_whoever_ends_by_itself_is_free_for_ever() -> None:
    assert following(took(ThinkingRule(LIMIT, VOCABULARY), 1, *END, *START, *range(50))) is None


def test_no_end_of_the_answer_comes_before_min_tokens() -> None:
    """While it thinks, after that, and along a draft; a forced end of thinking comes all the
    same."""
    rule = ThinkingRule(LIMIT, VOCABULARY, 4, (7, 310))
    others = [token for token in range(VOCABULARY) if token not in (7, 310)]
    assert following(rule, 3) == others and following(rule, 4) is None
    assert [bool((mask == 255).all()) for mask in rule.along([1, 2], 2)] == [False, False, True]
    assert following(took(rule, *range(1, 7)), 0) == [310]
    assert following(took(rule, *END), 3) == others


def test_min_tokens_count_in_the_batch_beside_a_budget() -> None:
    wanting = Sampling(temperature=0, logit_bias=((7, 100.0),))
    request = Request(
        prompts()[0], 9, wanting, min_tokens=5, ends=(7,), thinking=attrs.evolve(LIMIT, tokens=100)
    )
    [answer] = answers(StepEngine(build("llama"), VOCABULARY), [request])
    assert answer.index(7) == 5


@given(
    st.lists(st.sampled_from([1, 2, *START, *END]), max_size=12),
    st.lists(st.sampled_from([1, *END]), max_size=6),
)
def test_masks_along_a_draft_are_those_of_its_tokens_and_move_nothing(
    said: list[int], draft: list[int]
) -> None:
    rule = took(ThinkingRule(LIMIT, VOCABULARY), *said)
    along = rule.along(draft, 0)
    assert (along[0] == rule.allowed(0)).all() and len(along) == 1 + len(draft)
    for mask, token in zip(along[1:], draft, strict=True):
        took(rule, token)
        assert (mask == rule.allowed(0)).all()


@given(st.lists(st.sampled_from([1, 2, *START, *END]), max_size=30))
def test_thinking_never_outlasts_budget_and_end(said: list[int]) -> None:
    rule = ThinkingRule(LIMIT, VOCABULARY)
    written: list[int] = []
    for token in [*said, *[1] * 20]:
        must = following(rule)
        written.append(token if must is None else must[0])
        took(rule, written[-1])
    places = [n for n in range(len(written)) if tuple(written[n : n + 3]) == END]
    assert places and places[0] <= LIMIT.tokens


def test_in_a_batch() -> None:
    """Tokens before the end are those of the row without a bound; neighbours are as alone."""
    model = build("llama")
    bounded = Request(prompts()[0], 16, Sampling(temperature=0.9, seed=5), thinking=LIMIT)
    free = [Request(prompts()[1], 12, Sampling(temperature=0.9, seed=6)), Request(prompts()[2], 12)]

    def run(*requests: Request) -> list[list[int]]:
        return answers(StepEngine(model, VOCABULARY), [*requests])

    together = run(free[0], bounded, free[1])
    [unbounded] = run(attrs.evolve(bounded, thinking=None))
    assert together[1][:6] == unbounded[:6]
    assert tuple(together[1][6:9]) == END and len(together[1]) == 16
    assert [together[0], together[2]] == [run(free[0])[0], run(free[1])[0]]
