"""The embedded model: a real vocabulary, real weights. Four prompts, sixteen in the long version,
each alone, all together, joining and leaving."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import attrs
import pytest

from tests.engine.driver import GREEDY, Request, answers
from tests.engine.naive import certain_answer
from tests.family_configs import LONG
from trouper import ChatPrompt, Generate, Sampling, Settings, run_runtime
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.step import StepEngine

TOKENS = 7 if LONG else 5
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Why is the sky blue?",
    "Count from one to ten.",
    "Hi",
    "Translate 'cat' into German.",
    "How many legs has a spider?",
    "Tell me about the sea, its tides, its fish, and the people who live from it, in a few words.",
)
TEXTS = (
    "Once upon a time",
    "The",
    "1 + 1 =",
    "def fibonacci(n):",
    "Roses are red,",
    "In 1969, men first walked on",
    "A recipe for bread: take flour, water, salt and yeast, then",
    "\n",
)
SAMPLINGS = (
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=0.8, seed=100, top_k=40, top_p=0.95),
    Sampling(temperature=0.8, seed=200, top_p=0.9, repetition_penalty=1.1),
    Sampling(temperature=0.8, seed=300, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.5),
    Sampling(temperature=0.8, seed=400, top_k=200, logit_bias=((260, -5.0),)),
    GREEDY,
)


@cache
def smollm() -> EvaluatedModel:
    return load(Settings(), lambda _: None)


@cache
def prompts() -> list[tuple[int, ...]]:
    words = smollm().tokenizer
    chats = [words.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    return [*chats, *map(words.encode, TEXTS)]


def played() -> list[tuple[int, ...]]:
    """Every fourth prompt, all in the long version."""
    return prompts() if LONG else prompts()[1::4]


@cache
def alone(kind: str) -> list[tuple[Request, list[int]]]:
    """What the model's own loop for one row and a naive sampler answer."""
    samplings = [GREEDY] if kind == "greedy" else list(SAMPLINGS)
    cases = []
    for place, prompt in enumerate(played()):
        sampling, answer = certain_answer(
            smollm().model, prompt, samplings[place % len(samplings)], TOKENS
        )
        cases.append((Request(prompt, TOKENS, sampling), answer))
    return cases


def play(requests: Sequence[Request], chunk: int) -> list[list[int]]:
    return answers(StepEngine(smollm().model, smollm().card.vocab_size), requests, chunk)


kinds = pytest.mark.parametrize("kind", ["greedy", "seeded"])


@kinds
@pytest.mark.long
def test_r1_d1_d2_together(kind: str) -> None:
    cases = alone(kind)
    assert len({request.prompt for request, _ in cases}) == (16 if LONG else 4)
    assert play([request for request, _ in cases], 64) == [wanted for _, wanted in cases]


@kinds
@pytest.mark.long(but=("seeded*",))
def test_r1_d5_joining_and_leaving(kind: str) -> None:
    dice = random.Random(kind)
    cases = dice.sample(alone(kind), len(played()))
    script = []
    for place, (request, _) in enumerate(cases):
        join = dice.randrange(TOKENS)
        leave = join + dice.randrange(1, TOKENS) if place % 4 == 3 else None
        script.append(attrs.evolve(request, join=join, leave=leave))
    got = play(script, 20)
    for request, mine, (_, wanted) in zip(script, got, cases, strict=True):
        assert mine == (wanted if request.leave is None else wanted[: len(mine)]), request


async def test_paris() -> None:
    """Through the whole runtime."""
    import trio

    wish = Generate(
        request_id="paris",
        prompt=ChatPrompt(({"role": "user", "content": "What is the capital of France?"},)),
        sampling=Sampling(temperature=0),
        max_tokens=20,
    )
    async with trio.open_nursery() as nursery:
        runtime = await nursery.start(run_runtime, Settings(no_ssd=True))
        with await runtime.submit(wish) as answer:
            assert (
                "".join([delta.text async for delta in answer]) == "The capital of France is Paris."
            )
        assert answer.finished is not None
        assert answer.finished.reason == "stop"
        await runtime.drain(10)
