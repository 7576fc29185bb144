"""A row leaves the engine at any time and resumes later, in other company: its tokens and
log-probabilities are those of a row that never left."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import pytest
from mlx import nn

from tests import arithmetic
from tests.engine import test_grammar
from tests.engine.driver import GREEDY, Allow, Driver, Request
from tests.engine.naive import certain_answer
from tests.engine.oracle import Foretelling
from tests.engine.test_exactness import (
    PROMPTS,
    greedy_requests,
    model_of,
    other_half,
    seeded_requests,
)
from tests.engine.test_thinking import LIMIT
from tests.families import END
from tests.family_configs import VOCABULARY
from tests.real.serving import CLOSE, assert_close
from trouper import Sampling
from trouper.engine.step import StepEngine
from trouper.protocol.grammar import Grammar
from trouper.protocol.replies import TokenLogprobs

Answer = tuple[list[int], list[TokenLogprobs]]
TOKENS = 12
FAVOURED = (11, 23, 37, 41, 59)
BIAS = tuple((token, 30.0) for token in FAVOURED)
PENALIZED = (
    Sampling(
        temperature=0.8,
        seed=2**40 + 7,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        logit_bias=BIAS,
    ),
    Sampling(temperature=0.8, seed=2**33 + 1, repetition_penalty=1.3),
    Sampling(temperature=0, presence_penalty=1.5, repetition_penalty=1.05, logit_bias=BIAS),
    Sampling(temperature=0, frequency_penalty=1.9, logit_bias=BIAS),
    Sampling(temperature=0, repetition_penalty=1.3, logit_bias=BIAS),
)
"""So few tokens are likely that each repeats, and penalties decide which is next."""


def whole(engine: StepEngine, requests: Sequence[Request]) -> list[Answer]:
    """Each answer of rows that never leave."""
    return [(row.tokens, row.logprobs) for row in Driver(engine).play(requests)]


def interrupted(
    engine: StepEngine, requests: Sequence[Request], seed: str, allow: Allow | None = None
) -> list[Answer]:
    """The same when every row leaves and resumes several times, in orders and chunks of any kind.
    What was on its way when a row left is sampled again."""
    dice = random.Random(seed)
    sizes = [dice.choice((1, 5, 16, 32, 200)) for _ in range(64)]
    driver = Driver(engine, lambda step: sizes[step % 64], allow=allow)
    answers: list[Answer] = [([], []) for _ in requests]
    for last in (False, False, True):
        order = [
            place
            for place in range(len(requests))
            if len(answers[place][0]) < requests[place].tokens
        ]
        dice.shuffle(order)
        script = []
        for place in order:
            request, (tokens, _) = requests[place], answers[place]
            join = dice.randrange(6)
            script.append(
                attrs.evolve(
                    request,
                    prompt=[*request.prompt, *tokens],
                    tokens=request.tokens - len(tokens),
                    output_tokens=len(tokens),
                    join=join,
                    leave=None if last else join + dice.randrange(1, 9),
                )
            )
        for place, row in zip(order, driver.play(script), strict=True):
            answers[place] = answers[place][0] + row.tokens, answers[place][1] + row.logprobs
    limits = [
        request.tokens for request in requests
    ]  # Drafts may be accepted beyond the last token that was asked for.
    return [
        (tokens[:most], logprobs[:most])
        for (tokens, logprobs), most in zip(answers, limits, strict=True)
    ]


def assert_same(
    got: Sequence[Answer],
    wanted: Sequence[Answer],
    model: nn.Module | None = None,
    requests: Sequence[Request] = (),
) -> None:
    """Of this model's answers to these requests, if told, rounding to TF32 may change what it may
    (see tests/arithmetic.py)."""
    for place, ((tokens, logprobs), (right, told)) in enumerate(zip(got, wanted, strict=True)):
        alike = len(right)
        if model is None:
            assert tokens == right, place
        else:
            arithmetic.assert_tokens(
                model, requests[place].prompt, requests[place].sampling, tokens, right, place
            )
            alike = next((at for at in range(alike) if tokens[at] != right[at]), alike)
        assert len(tokens) == len(right)
        close = max(CLOSE, arithmetic.CLOSE if arithmetic.TF32 else 0.0)
        assert_close(logprobs[:alike], told[:alike], str(place), close)


@other_half
def test_rows_of_every_kind(name: str) -> None:
    """Greedy and seeded, with penalties and without, with log-probabilities; attention, rings,
    recurrent state, experts."""
    cases = [*greedy_requests(name)[:5], *seeded_requests(name)]
    requests = [
        attrs.evolve(request, logprobs=place % 4) for place, (request, _) in enumerate(cases)
    ]
    alone = whole(StepEngine(model_of(name), VOCABULARY), requests)
    assert_same(
        [(answer, []) for _, answer in cases],
        [(tokens, []) for tokens, _ in alone],
        model_of(name),
        requests,
    )
    assert_same(
        interrupted(StepEngine(model_of(name), VOCABULARY), requests, name),
        alone,
        model_of(name),
        requests,
    )


def certain(name: str, place: int, sampling: Sampling, tokens: int = TOKENS) -> Request:
    """A request that no rounding changes."""
    seeded, _ = certain_answer(model_of(name), PROMPTS[place], sampling, tokens)
    return Request(PROMPTS[place], tokens, seeded)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "jamba"])
@pytest.mark.long(but=("llama", "jamba"))
def test_penalties_know_prompt_and_output_apart(name: str) -> None:
    """Presence and frequency are of the output alone, repetition of both; seeds beyond 32 bits."""
    requests = [
        Request([*PROMPTS[place], *FAVOURED[:3]], TOKENS, one, logprobs=2)
        for place, one in enumerate(PENALIZED)
    ]
    alone = whole(StepEngine(model_of(name), VOCABULARY), requests)
    assert_same(
        interrupted(StepEngine(model_of(name), VOCABULARY), requests, name),
        alone,
        model_of(name),
        requests,
    )


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "granitemoehybrid"])
@pytest.mark.long(but=("llama", "gpt_oss"))
def test_drafts_go_on(name: str) -> None:
    cases = [*greedy_requests(name)[:4], *seeded_requests(name)[:5]]
    answers = {
        (*request.prompt, *answer[:place]): answer[place:]
        for request, answer in cases
        for place in range(len(answer))
    }
    drafting = Foretelling(tokens=4, answers=answers, dice=random.Random(name))
    requests = [attrs.evolve(request, drafts=True, logprobs=1) for request, _ in cases]
    alone = whole(StepEngine(model_of(name), VOCABULARY), requests)
    engine = StepEngine(model_of(name), VOCABULARY, drafting=drafting)
    assert_same(
        interrupted(engine, requests, name, lambda step: 4 if step % 3 else 0),
        alone,
        model_of(name),
        requests,
    )


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "[a-f]{2}x[0-9]{3,9}(yes|no)"),
        Grammar(
            "json_schema",
            '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
        ),
        Grammar("choice", '["one or the other", "the other one"]'),
    ],
)
def test_grammars_are_replayed(grammar: Grammar) -> None:
    samplings = [GREEDY, *(Sampling(temperature=1.0, seed=seed) for seed in range(4))]
    requests = [
        Request((10 + n, 20, 30), 24, sampling, grammar=grammar)
        for n, sampling in enumerate(samplings)
    ]
    wanted = whole(test_grammar.engine(), requests)
    assert len({tuple(tokens) for tokens, _ in wanted}) > 1
    assert_same(interrupted(test_grammar.engine(), requests, grammar.source), wanted)


def test_min_tokens_count_from_the_beginning() -> None:
    """An end that is likely is not drawn before its time, and is drawn then."""
    early = Sampling(temperature=1, seed=3, logit_bias=((END, 100.0),))
    plain = Request((10, 20, 30), 10, early, min_tokens=6, ends=(END,))
    requests = [plain, attrs.evolve(plain, grammar=Grammar("regex", "[a-z]*"))]
    wanted = whole(test_grammar.engine(), requests)
    assert [tokens.index(END) for tokens, _ in wanted] == [6, 6]
    for seed in range(8):
        assert_same(interrupted(test_grammar.engine(), requests, str(seed)), wanted)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.long(but=("True",))
def test_the_thinking_limit_goes_on_where_it_was(begun: bool) -> None:
    limit = attrs.evolve(LIMIT, begun=begun)
    starting = tuple((token, 100.0) for token in LIMIT.start)
    requests = [
        attrs.evolve(
            certain("llama", place, Sampling(temperature=0.8, seed=place)),
            thinking=limit,
            tokens=16,
        )
        for place in range(3)
    ]
    requests += [
        Request(
            PROMPTS[3], 16, Sampling(temperature=1, seed=5, logit_bias=starting), thinking=limit
        )
    ]
    wanted = whole(StepEngine(model_of("llama"), VOCABULARY), requests)
    assert not begun or all(tuple(tokens[6:9]) == LIMIT.end for tokens, _ in wanted)
    for seed in range(4):
        assert_same(
            interrupted(StepEngine(model_of("llama"), VOCABULARY), requests, f"{begun} {seed}"),
            wanted,
        )
