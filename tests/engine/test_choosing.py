"""From logits to tokens in the engine: what order bias, penalties, masks and log-probabilities come
in, with drafts and without."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn

from tests.arithmetic import CLOSE
from tests.engine.driver import GREEDY, Driver, Request
from tests.engine.naive import Floats, certain_answer, shaped, softmax
from tests.engine.oracle import Foretelling
from tests.engine.test_exactness import PROMPTS, model_of
from tests.engine.test_grammar import tiny
from tests.engine.test_sampler import PENALIZED, logits_of
from tests.families import END
from tests.family_configs import VOCABULARY
from tests.long_tests import examples
from trouper.engine.distributed.rank_group import ALONE
from trouper.engine.sampling.penalties import History
from trouper.engine.sampling.row_state import RowState, admitted
from trouper.engine.sampling.sampler import BatchSampler
from trouper.engine.sampling.sampling_batch import SamplingBatch
from trouper.engine.spec_decode.draft_proposals import DraftProposals
from trouper.engine.spec_decode.prompt_lookup import Drafting
from trouper.engine.step import StepEngine
from trouper.protocol.grammar import Grammar
from trouper.protocol.plans import Admit, RowId
from trouper.protocol.sampling import Sampling

WISHES = tuple((token, 4.0) for token in range(0, VOCABULARY, 9))
SHAPED = (
    Sampling(temperature=0.8, seed=10, logit_bias=WISHES, repetition_penalty=3.0),
    Sampling(
        temperature=0.8, seed=20, top_k=9, logit_bias=((7, 6.0), (8, -100.0)), frequency_penalty=1.5
    ),
    Sampling(temperature=0.7, seed=30, frequency_penalty=2.0),
    Sampling(
        temperature=0.8,
        seed=40,
        logit_bias=((3, -50.0), (11, 5.0), (12, 5.0)),
        presence_penalty=1.5,
    ),
    Sampling(temperature=0.9, seed=50, top_p=0.9, repetition_penalty=0.7, logit_bias=((5, 2.0),)),
)
TOKENS = 12
drafted = pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])


def engine_that_drafts(
    model: nn.Module, requests: Sequence[Request], answers: Sequence[Sequence[int]]
) -> StepEngine:
    """Drafts are the answers' own tokens, some of them wrong."""
    known = {
        tuple(request.prompt): answer for request, answer in zip(requests, answers, strict=True)
    }
    drafting = Foretelling(tokens=4, answers=known, dice=random.Random(3), vocabulary=VOCABULARY)
    return StepEngine(model, VOCABULARY, grammars=tiny().tokenizer.grammars, drafting=drafting)


def play(
    model: nn.Module, requests: Sequence[Request], answers: Sequence[Sequence[int]], *, drafts: bool
) -> tuple[list[list[int]], Driver]:
    """Each row's tokens, as many as it wanted, in an engine that drafts from `answers` or one that
    does not."""
    driver = Driver(
        engine_that_drafts(model, requests, answers), allow=(lambda _: 4) if drafts else None
    )
    rows = driver.play([attrs.evolve(request, drafts=drafts) for request in requests])
    if drafts:
        assert {1, 2} <= {right for _, _, right in driver.drafted}, (
            "drafts of every kind, or this shows little"
        )
    return [row.tokens[: row.request.tokens] for row in rows], driver


@drafted
def test_d1_bias_comes_before_penalties_and_both_before_the_draw(drafts: bool) -> None:
    """Rows of all kinds side by side, each against float64 and a loop over the model alone."""
    model = model_of("llama")
    cases = [
        certain_answer(model, prompt, row, TOKENS)
        for prompt, row in zip(PROMPTS, SHAPED, strict=False)
    ]
    requests = [
        Request(prompt, TOKENS, row) for prompt, (row, _) in zip(PROMPTS, cases, strict=False)
    ]
    answers = [answer for _, answer in cases]
    assert play(model, requests, answers, drafts=drafts)[0] == answers


@drafted
def test_logprobs_are_the_models_own(drafts: bool) -> None:
    """Whatever was added to the logits of a row: its log-probabilities are those of the raw ones,
    as `Sampling` promises."""
    model = model_of("llama")
    asked = [0, 5, 20, 1, 3]
    requests = [
        Request(prompt, TOKENS, row, logprobs=top)
        for prompt, row, top in zip(PROMPTS, SHAPED, asked, strict=False)
    ]
    requests += [
        attrs.evolve(
            requests[1], prompt=PROMPTS[5], sampling=Sampling(temperature=2.0, seed=9, top_k=3)
        )
    ]
    plain = [row.tokens for row in Driver(engine_that_drafts(model, (), ())).play(requests)]
    driver = Driver(
        engine_that_drafts(model, requests, plain), allow=(lambda _: 4) if drafts else None
    )
    moved = 0.0
    for row in driver.play([attrs.evolve(request, drafts=drafts) for request in requests]):
        exact = raw_logprobs(model, row.request.prompt, row.tokens)
        assert [said.token for said in row.logprobs] == row.tokens
        for said, wanted in zip(row.logprobs, exact, strict=True):
            assert said.logprob == pytest.approx(wanted[said.token], abs=max(2e-3, CLOSE))
            assert len(said.top) == row.request.logprobs
            np.testing.assert_allclose(
                [value for _, value in said.top],
                -np.sort(-wanted)[: len(said.top)],
                atol=max(2e-3, CLOSE),
            )
            assert all(
                value == pytest.approx(wanted[token], abs=max(2e-3, CLOSE))
                for token, value in said.top
            )
            moved = max(moved, wanted.max() - wanted[said.token])
    assert moved > 2, (
        "bias and penalties took other tokens than the likeliest, or this shows little"
    )


@settings(max_examples=examples(40))
@given(
    st.lists(
        st.sampled_from(
            [
                *PENALIZED,
                Sampling(
                    repetition_penalty=0.3, logit_bias=tuple((token, 4.0) for token in range(16))
                ),
            ]
        ),
        min_size=1,
        max_size=5,
    ),
    st.lists(st.integers(0, 15), min_size=1, max_size=8),
    st.integers(0, 9),
)
def test_d1_what_is_added_to_logits_is_added_in_one_order(
    rows: list[Sampling], prompt: list[int], seed: int
) -> None:
    """Bias, then penalties, over some steps; log-probabilities are those of the logits before."""
    greedy = [attrs.evolve(row, temperature=0.0) for row in rows]
    ids = tuple(map(RowId, range(len(rows))))
    states = {
        row: RowState(
            np.array(prompt, np.int32), one, 4, history=History(np.array(prompt, np.int32), 16)
        )
        for row, one in zip(ids, greedy, strict=True)
    }
    choosing, said = SamplingBatch(16, ALONE, states), [list[int]() for _ in rows]
    choosing.join(ids)
    for step in range(3):
        logits = logits_of(16, len(rows), seed=10 * seed + step)
        sampled = choosing.sample(mx.array(logits), None, lambda: None, None)
        tokens = np.array(sampled.tokens)
        assert sampled.logprobs is not None
        for place, (row, told) in enumerate(sampled.logprobs.read()):
            raw = logits[place].astype(np.float64)
            wanted = shaped(raw, greedy[place], prompt, said[place])
            said[place].append(int(tokens[place]))
            assert row == ids[place] and told.token == said[place][-1]
            assert wanted[told.token] >= wanted.max() - 1e-4
            exact = np.log(softmax(raw))
            assert told.logprob == pytest.approx(exact[told.token], abs=1e-4)
            np.testing.assert_allclose(
                [value for _, value in told.top], -np.sort(-exact)[:4], atol=1e-4
            )


def raw_logprobs(model: nn.Module, prompt: Sequence[int], answer: Sequence[int]) -> list[Floats]:
    """Of each token of the answer, from one pass of the model over all."""
    logits = model(mx.array([[*prompt, *answer[:-1]]]))[0].astype(mx.float32)
    return [np.log(softmax(np.array(row, np.float64))) for row in logits[len(prompt) - 1 :]]


@drafted
def test_no_end_comes_before_min_tokens_and_then_any_may(drafts: bool) -> None:
    """Two ends, and a bias that wants nothing else. A row beside them may end at once."""
    model, ends = model_of("llama"), (END, 7)
    wanting = [
        Sampling(temperature=1.0, seed=place, logit_bias=((ends[place], 100.0),))
        for place in (0, 1)
    ]
    requests = [
        Request(PROMPTS[0], 9, wanting[0], min_tokens=5, ends=ends),
        Request(PROMPTS[1], 9, wanting[1], min_tokens=3, ends=ends),
        Request(PROMPTS[2], 9, wanting[0], ends=ends),
        Request(PROMPTS[3], 9, wanting[1], min_tokens=1, ends=ends),
    ]
    plain = [row.tokens for row in Driver(engine_that_drafts(model, (), ())).play(requests)]
    got, _ = play(model, requests, plain, drafts=drafts)
    assert got == plain
    first = [next(place for place, token in enumerate(answer) if token in ends) for answer in got]
    assert first == [5, 3, 0, 1]


@drafted
def test_an_end_that_no_logit_has_touches_nobody(drafts: bool) -> None:
    """An index beyond a row's logits is one of the next row's, and one far beyond is memory of
    somebody else: a client may name any."""
    model = model_of("llama")
    [beside] = [
        row.tokens
        for row in Driver(engine_that_drafts(model, (), ())).play([Request(PROMPTS[1], 6, GREEDY)])
    ]
    requests = [
        Request(PROMPTS[0], 6, GREEDY, min_tokens=5, ends=(VOCABULARY + beside[0],)),
        Request(PROMPTS[1], 6, GREEDY),
    ]
    plain = [row.tokens for row in Driver(engine_that_drafts(model, (), ())).play(requests)]
    got, _ = play(model, requests, plain, drafts=drafts)
    assert got == plain and got[1] == beside


def test_ends_beyond_the_logits_never_reach_the_device() -> None:
    """The process would end with a segmentation fault."""
    admit = Admit(
        RowId(1), bytes(4), GREEDY, min_tokens=5, ends=(7, VOCABULARY - 1, VOCABULARY, 2**31 - 1)
    )
    assert admitted(admit, VOCABULARY, None).ends == (7, VOCABULARY - 1)


@drafted
def test_each_row_follows_its_own_grammar(drafts: bool) -> None:
    """Rows of several grammars and none, with a bias that wants what no grammar allows."""
    loaded = tiny()
    wish = tuple((token, 100.0) for token in loaded.tokenizer.encode("xyz"))
    patterns = ["[ab]{9}", "[cd]{7}[ef]", "([gh][ij]){4}"]
    requests = [Request(PROMPTS[5], 10, GREEDY)] + [
        Request(
            prompt,
            12,
            Sampling(temperature=1.0, seed=place, logit_bias=wish),
            grammar=Grammar("regex", pattern),
        )
        for place, (prompt, pattern) in enumerate(zip(PROMPTS, patterns, strict=False))
    ]
    plain = [row.tokens for row in Driver(engine_that_drafts(loaded.model, (), ())).play(requests)]
    [alone] = [
        row.tokens for row in Driver(engine_that_drafts(loaded.model, (), ())).play(requests[:1])
    ]
    got, driver = play(loaded.model, requests, plain, drafts=drafts)
    assert got == plain and got[0] == alone
    assert not driver.failed
    for answer, pattern in zip(got[1:], patterns, strict=True):
        text = b"".join(map(loaded.tokenizer.token_bytes, answer[: answer.index(END)])).decode()
        assert re.fullmatch(pattern, text), text


def test_no_row_drafts_more_than_the_plan_allows() -> None:
    model = model_of("llama")
    requests = [Request(prompt, TOKENS) for prompt in PROMPTS[:4]]
    plain = [row.tokens for row in Driver(engine_that_drafts(model, (), ())).play(requests)]
    driver = Driver(engine_that_drafts(model, requests, plain), allow=lambda _: 2)
    driver.play([attrs.evolve(request, drafts=True) for request in requests])
    assert {tokens for _, tokens, _ in driver.drafted} == {1, 2}


def test_drafts_are_of_the_row_that_made_them() -> None:
    model = model_of("llama")
    requests = [Request(prompt, TOKENS) for prompt in PROMPTS[:4]]
    plain = [row.tokens for row in Driver(engine_that_drafts(model, (), ())).play(requests)]
    driver = Driver(engine_that_drafts(model, requests, plain), allow=lambda _: 4)
    driver.play(
        [attrs.evolve(request, drafts=place == 2) for place, request in enumerate(requests)]
    )
    assert {row for row, _, _ in driver.drafted} == {RowId(2)}
    assert sum(right for _, _, right in driver.drafted) > 2


def test_only_rows_that_match_something_are_told() -> None:
    proposing, (one, other, never) = (
        DraftProposals(Drafting(min_ngram=2, max_ngram=4)),
        map(RowId, range(3)),
    )
    proposing.open(one, [1, 2, 3, 1, 2])
    proposing.open(other, [1, 2, 3, 4, 5])
    assert proposing.matched([one, other, never]) == ((one, 2),)
    proposing.append((one, other), (3, 1))
    assert dict(proposing.matched([one, other, never])) == {one: 3}
    proposing.append((one, other), (9, 2))
    assert dict(proposing.matched([one, other, never])) == {other: 2}
    assert proposing.drafts({one: 4, other: 1, never: 4}) == {other: [3]}
    proposing.drop([other])
    assert proposing.matched([one, other, never]) == ()


@pytest.mark.parametrize("top_k", [0, 40])
def test_the_smallest_typical_p_leaves_the_most_typical_token(top_k: int) -> None:
    """The best token is less surprising than the entropy is, and the others are near it. float32
    has 0 for what is so small."""
    logits = np.zeros((1, 100), np.float32)
    logits[0, 7] = 3.0

    def chosen(typical_p: float) -> int:
        sampler = BatchSampler([Sampling(typical_p=typical_p, top_k=top_k)], 100)
        return int(np.array(sampler(mx.array(logits), np.array([0], np.uint64)))[0])

    assert chosen(1e-46) == chosen(1e-40) == chosen(1e-30) != 7
