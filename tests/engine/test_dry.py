"""DRY, typical_p and XTC of rows in the batch: as a naive search and sampler have them, alone and
together, left and resumed, with drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.driver import Driver, Request
from tests.engine.naive import certain_answer, repetitions, shaped
from tests.engine.oracle import Foretelling
from tests.engine.test_exactness import assert_equal_as_far, model_of
from tests.engine.test_resuming import assert_same, interrupted, whole
from tests.families import prompts
from tests.family_configs import VOCABULARY
from tests.long_tests import examples
from trouper.engine.loading.sequence_breakers import MAX_SEQUENCES, breakers_of
from trouper.engine.sampling import dry
from trouper.engine.sampling.dry import Dry, Repetitions, matches_of, tokens_after_break
from trouper.engine.spec_decode.verification_spans import Spans
from trouper.engine.step import StepEngine
from trouper.protocol.plans import Breakers
from trouper.protocol.problems import RequestFailed
from trouper.protocol.sampling import Sampling

SMALL = 5
"""Tokens of a vocabulary in which everything repeats."""
TOKENS = 12
NONE = Breakers()
DRY = Sampling(temperature=0, dry_multiplier=5.0, dry_base=1.5)
LONG = attrs.evolve(DRY, dry_base=1.01)
FAVOURED = tuple((token, 30.0) for token in (11, 23, 37))
REPEATING = [
    [*prompt, 11, 23, 37, 40, 11, 23, 37, 40, 11, 23] for prompt in prompts((2, 17, 40, 5, 30, 9))
]
FURTHER = (
    attrs.evolve(DRY, logit_bias=FAVOURED),
    attrs.evolve(DRY, temperature=0.8, seed=2**35, dry_penalty_last_n=7, logit_bias=FAVOURED),
    Sampling(temperature=0.9, seed=3, typical_p=0.7, top_k=6),
    Sampling(temperature=0.9, seed=3, xtc_probability=0.6, xtc_threshold=0.05, logit_bias=FAVOURED),
    Sampling(temperature=0.8, seed=1),
    attrs.evolve(
        DRY,
        temperature=0.9,
        seed=90,
        top_k=30,
        xtc_probability=0.4,
        xtc_threshold=0.1,
        dry_allowed_length=1,
        frequency_penalty=0.2,
        logit_bias=FAVOURED,
    ),
)
"""Rows with DRY, with filters, with both, and with neither."""


@cache
def cases() -> list[tuple[Request, list[int]]]:
    """What the model alone and the naive sampler answer."""
    found = []
    for prompt, sampling in zip(REPEATING, FURTHER, strict=True):
        seeded, answer = certain_answer(model_of("llama"), prompt, sampling, TOKENS)
        found.append((Request(prompt, TOKENS, seeded), answer))
    return found


def penalties(dry_rows: Dry, rows: int, spans: Spans | None = None) -> list[list[float]]:
    found: list[list[float]] = dry_rows(mx.zeros((rows, SMALL)), spans).tolist()  # type: ignore[assignment]
    return found


def wanted(tokens: Sequence[int], sampling: Sampling, breakers: Breakers = NONE) -> list[float]:
    single = set(np.frombuffer(breakers.tokens, "<i4").tolist())

    def breaks(ending: Sequence[int]) -> bool:
        spread = any(tuple(ending[-len(sequence) :]) == sequence for sequence in breakers.sequences)
        return bool(ending) and (ending[-1] in single or (spread and len(ending) > 1))

    none = np.zeros(SMALL)
    return shaped(none, sampling, tokens, (), breaks).tolist()


def batch(rows: Sequence[tuple[Sequence[int], Sampling, Breakers]]) -> Dry:
    states = [
        Repetitions.of(np.array(tokens, np.int32), sampling, breakers, SMALL)
        if sampling.dry
        else None
        for tokens, sampling, breakers in rows
    ]
    return Dry([sampling for _, sampling, _ in rows], states)


samplings = st.builds(
    Sampling,
    dry_multiplier=st.sampled_from((0.0, 0.5, 1.0)),
    dry_base=st.sampled_from((1.0, 1.2, 1.75)),
    dry_allowed_length=st.integers(1, 4),
    dry_penalty_last_n=st.sampled_from((-1, 0, 1, 5, 12)),
)
breakings = st.builds(
    lambda single, spread: Breakers(np.array(sorted(single), "<i4").tobytes(), tuple(spread)),
    st.sets(st.integers(0, SMALL - 1), max_size=1),
    st.lists(st.tuples(st.integers(0, SMALL - 1), st.integers(0, SMALL - 1)), max_size=2),
)
texts = st.lists(st.integers(0, SMALL - 1), min_size=1, max_size=40)


class TestAgainstTheDefinition:
    def test_a_breaker_is_never_penalized(self) -> None:
        said, three = [1, 2, 3, 1, 2], Breakers(np.array([3], "<i4").tobytes())
        assert penalties(batch([(said, DRY, three)]), 1) == [[0.0] * SMALL]
        assert penalties(batch([(said, DRY, NONE)]), 1)[0][3] < 0

    @given(st.lists(st.tuples(texts, samplings, breakings), min_size=1, max_size=4), st.data())
    @settings(max_examples=examples(60), deadline=None)
    def test_rows_of_any_parameters(
        self, rows: list[tuple[list[int], Sampling, Breakers]], data: st.DataObject
    ) -> None:
        """From any beginning, token by token."""
        dry_rows = batch(rows)
        texts_so_far = [list(tokens) for tokens, _, _ in rows]
        for _ in range(6):
            found = penalties(dry_rows, len(rows))
            for tokens, (_, sampling, breakers), got in zip(texts_so_far, rows, found, strict=True):
                assert got == pytest.approx(wanted(tokens, sampling, breakers), rel=1e-5), (
                    tokens,
                    sampling,
                    breakers,
                )
            following = data.draw(
                st.lists(st.integers(0, SMALL - 1), min_size=len(rows), max_size=len(rows))
            )
            dry_rows.count(mx.array(following, mx.uint32))
            for tokens, token in zip(texts_so_far, following, strict=True):
                tokens.append(token)

    @given(st.lists(st.tuples(texts, samplings, breakings), min_size=1, max_size=3), st.data())
    @settings(max_examples=examples(40), deadline=None)
    def test_drafts_are_judged_in_their_place(
        self, rows: list[tuple[list[int], Sampling, Breakers]], data: st.DataObject
    ) -> None:
        draft = st.lists(st.integers(0, SMALL - 1), max_size=4)
        drafts = data.draw(st.lists(draft, min_size=len(rows), max_size=len(rows)))
        if not any(drafts):
            drafts[0] = [0]
        spans, dry_rows = Spans(drafts), batch(rows)
        found = iter(penalties(dry_rows, len(spans.owners), spans))
        for (tokens, sampling, breakers), own in zip(rows, drafts, strict=True):
            for step in range(len(own) + 1):
                assert next(found) == pytest.approx(
                    wanted([*tokens, *own[:step]], sampling, breakers), rel=1e-5
                )
        accepted = [data.draw(st.integers(0, len(own))) for own in drafts]
        sampled = np.concatenate([np.array([*own, 1], np.int32) for own in drafts])
        dry_rows.accepted(spans, sampled, spans.steps <= np.array(accepted)[spans.owners])
        after = penalties(dry_rows, len(rows))
        for (tokens, sampling, breakers), own, right, got in zip(
            rows, drafts, accepted, after, strict=True
        ):
            said = [*tokens, *[*own, 1][: right + 1]]
            assert got == pytest.approx(wanted(said, sampling, breakers), rel=1e-5)

    def test_arrays_grow(self) -> None:
        tokens = ([1, 2, 3, 4] * 64)[:-2]
        dry_rows = batch([(tokens, LONG, NONE), ([0], LONG, NONE)])
        for token in (3, 4, 1, 2, 3, 4, 1):
            tokens.append(token)
            dry_rows.count(mx.array([token, token], mx.uint32))
        assert penalties(dry_rows, 2)[0] == pytest.approx(wanted(tokens, LONG), rel=1e-5)

    def test_the_longest_repetition_stays_finite(self) -> None:
        tokens = [1] * (dry.LONGEST_MATCH + 300)
        found = penalties(batch([(tokens, DRY, NONE)]), 1)[0]
        assert found[1] < -1e29 and np.isfinite(found).all()

    def test_without_dry_nothing_is_made(self) -> None:
        logits = mx.zeros((2, SMALL))
        rows = batch(
            [
                ([1, 1, 1], Sampling(), NONE),
                ([2, 2], Sampling(dry_penalty_last_n=0, dry_multiplier=1), NONE),
            ]
        )
        assert rows(logits) is logits and rows.state() == []


class TestRowsThatEnter:
    """The search runs on the engine's thread: it may take no square of a prompt, nor a comparison
    of each place with each breaker."""

    @given(
        st.lists(st.integers(0, 1), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 400)
    )
    @settings(max_examples=examples(60), deadline=None)
    def test_matches_of_texts_that_repeat_themselves(
        self, text: list[int], times: int, longest: int
    ) -> None:
        tokens = (text * 3 * times)[:400]
        ends = range(len(tokens) - 1)
        common = [
            next((n for n in range(end + 1) if tokens[end - n] != tokens[-1 - n]), end + 1)
            for end in ends
        ]
        found = matches_of(np.array(tokens, np.int32), longest).tolist()
        assert found == [*(min(length, longest) for length in common), 0]

    def test_a_long_prompt_of_one_token(self) -> None:
        longest, tokens = 2**20, np.ones(60_000, np.int32)
        assert matches_of(tokens, longest).tolist() == [*range(1, 60_000), 0]
        assert matches_of(tokens[:300], 100).tolist() == [
            *(min(end, 100) for end in range(1, 300)),
            0,
        ]

    def test_a_long_prompt_and_many_breakers(self) -> None:
        tokens, nothing = np.arange(60_000, dtype=np.int32), np.zeros(60_000, np.bool_)
        sequences = tuple((token, 1, 2) for token in range(10, MAX_SEQUENCES))
        assert tokens_after_break(tokens, nothing, sequences, 2**20) == 60_000
        assert tokens_after_break(tokens, nothing, (*sequences, (59_000, 59_001)), 2**20) == 998

    def test_the_newest_breaker_counts(self) -> None:
        tokens = np.array([1, 2, 0, 1, 2, 0, 0], np.int32)
        assert tokens_after_break(tokens, np.zeros(SMALL, np.bool_), ((1, 2), (1, 2, 0)), 99) == 1

    def test_only_what_a_repetition_may_reach_is_looked_at(self) -> None:
        """A token without a place in the table of breakers would be an IndexError."""
        tokens = np.array([9, 9, 9, 1, 2, 1, 2], np.int32)
        assert tokens_after_break(tokens, np.zeros(SMALL, np.bool_), ((9, 9),), 4) == 4


class TestBreakers:
    PIECES = (b"", b"a", b"b", b": ", b'":', b"\n", b"User", b"ser:", b"U", b"xU", b":")

    def encode(self, text: str) -> list[int]:
        return [
            self.PIECES.index(piece.encode()) for piece in {"ser:": ["ser:"]}.get(text, list(text))
        ]

    def test_in_one_token_and_over_several(self) -> None:
        found = breakers_of(("U:", ":"), self.PIECES, self.encode)
        assert np.frombuffer(found.tokens, "<i4").tolist() == [3, 4, 7, 10]
        assert found.sequences == ((8, 10), (9, 10))

    def test_a_rest_that_is_written_otherwise_is_left_out(self) -> None:
        found = breakers_of(("ba",), self.PIECES, lambda text: [2] if text == "a" else [])
        assert found.sequences == ()

    def test_too_many(self) -> None:
        pieces = [b"a"] * (MAX_SEQUENCES + 1) + [b"b"]
        with pytest.raises(RequestFailed, match="fewer, or shorter"):
            breakers_of(("ab",), pieces, lambda _: [len(pieces) - 1])

    def test_a_repetition_ends_at_a_breaker(self) -> None:
        tokens = [1, 2, 3, 0, 1, 2, 3]
        assert repetitions(tokens, DRY, lambda _: False) == {0: 3}
        assert wanted(tokens, DRY, Breakers(np.array([2], "<i4").tobytes())) == [0] * SMALL
        assert penalties(batch([(tokens, DRY, Breakers(np.array([2], "<i4").tobytes()))]), 1) == [
            [0] * SMALL
        ]


class TestRows:
    def test_the_cases_show_something(self) -> None:
        plain = [
            attrs.evolve(sampling, dry_multiplier=0, typical_p=1, xtc_probability=0)
            for sampling in FURTHER
        ]
        changed = [
            answer_with(request, attrs.evolve(one, seed=request.sampling.seed)) != answer
            for (request, answer), one in zip(cases(), plain, strict=True)
        ]
        assert changed.count(True) == len(FURTHER) - 1

    def test_alone(self) -> None:
        driver = Driver(StepEngine(model_of("llama"), VOCABULARY))
        for request, answer in cases():
            assert_equal_as_far("llama", [request], [driver.play([request])[0].tokens], [answer])

    @pytest.mark.parametrize("chunk", [7, 512])
    def test_together(self, chunk: int) -> None:
        requests = [
            attrs.evolve(request, join=3 * place) for place, (request, _) in enumerate(cases())
        ]
        answers = [answer for _, answer in cases()]
        got = [
            row.tokens
            for row in Driver(StepEngine(model_of("llama"), VOCABULARY), chunk).play(requests)
        ]
        assert_equal_as_far("llama", requests, got, answers)

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.long(but=("0",))
    def test_left_and_resumed(self, seed: int) -> None:
        requests = [attrs.evolve(request, logprobs=1) for request, _ in cases()]
        alone = whole(StepEngine(model_of("llama"), VOCABULARY), requests)
        assert [tokens for tokens, _ in alone] == [answer for _, answer in cases()]
        engine = StepEngine(model_of("llama"), VOCABULARY)
        assert_same(interrupted(engine, requests, str(seed)), alone, model_of("llama"), requests)

    @pytest.mark.parametrize("seed", range(3))
    def test_with_drafts(self, seed: int) -> None:
        answers = {tuple(request.prompt): answer for request, answer in cases()}
        drafting = Foretelling(tokens=4, answers=answers, dice=random.Random(seed))
        engine = StepEngine(model_of("llama"), VOCABULARY, drafting=drafting)
        requests = [attrs.evolve(request, drafts=True) for request, _ in cases()]
        driver = Driver(engine, allow=lambda step: 4 if step % 3 else 0)
        got = [row.tokens[:TOKENS] for row in driver.play(requests)]
        assert sum(right for _, _, right in driver.drafted) > 10
        assert_equal_as_far("llama", requests, got, [answer for _, answer in cases()])

    def test_breakers_of_a_row(self) -> None:
        """The row may repeat what stands after the breaker; its neighbour may not."""
        breakers = Breakers(np.array([11, 23, 37, 40], "<i4").tobytes())
        request = Request(REPEATING[0], 12, FURTHER[0])
        free = attrs.evolve(request, sampling=attrs.evolve(FURTHER[0], dry_multiplier=0))
        rows = Driver(StepEngine(model_of("llama"), VOCABULARY)).play(
            [attrs.evolve(request, breakers=breakers), request, free]
        )
        assert rows[0].tokens == rows[2].tokens != rows[1].tokens


def answer_with(request: Request, sampling: Sampling) -> list[int]:
    driver = Driver(StepEngine(model_of("llama"), VOCABULARY))
    return driver.play([attrs.evolve(request, sampling=sampling)])[0].tokens
