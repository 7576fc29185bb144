"""Grammars, row by row in one batch, on the embedded model: every answer follows its own, and no row changes another."""

from __future__ import annotations

import json
import re
from functools import cache

import attrs
import pytest

from tests.engine.driver import GREEDY, Request, answers
from tests.model.test_smollm import prompts, smollm
from trouper import Sampling
from trouper.engine.step import StepEngine
from trouper.protocol.grammar import Grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "legs": {"type": "integer", "minimum": 0, "maximum": 100},
        "tame": {"type": "boolean"},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "legs", "tame", "kind"],
    "additionalProperties": False,
}
HOT = Sampling(temperature=1.0, seed=7)
COLD_SEEDED = Sampling(temperature=0.7, seed=3, top_k=40)
GRAMMARS = (
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", r"[a-f]{3}-[0-9]{2,4}"),
    Grammar("choice", '["yes", "no", "maybe not"]'),
    Grammar("lark", 'start: "<" /[a-z]{1,5}/ ">"'),
)


def engine() -> StepEngine:
    loaded = smollm()
    return StepEngine(loaded.model, loaded.card.vocab_size, grammars=loaded.tokenizer.grammars)


def requests() -> list[Request]:
    """Each grammar greedy and hot, between rows of every other kind."""
    free = [
        Request(prompts()[0], 12),
        Request(prompts()[1], 12, HOT),
        Request(prompts()[2], 12, attrs.evolve(COLD_SEEDED, repetition_penalty=1.2), logprobs=3),
        Request(prompts()[3], 12, attrs.evolve(GREEDY, logit_bias=((260, 4.0),)), min_tokens=10, ends=(0, 2)),
    ]
    bound = [
        Request(prompts()[4 + n], 64, sampling, grammar=grammar)
        for n, (grammar, sampling) in enumerate((g, s) for g in GRAMMARS for s in (GREEDY, HOT))
    ]
    return [*bound[:4], *free, *bound[4:]]


@cache
def alone() -> list[list[int]]:
    return [tokens for request in requests() for tokens in answers(engine(), [request])]


def text(tokens: list[int]) -> str:
    words = smollm().tokenizer
    ends = [place for place, token in enumerate(tokens) if token in words.eos_token_ids]
    assert ends, "a grammar that is complete ends"
    return b"".join(words.token_bytes(token) for token in tokens[: ends[0]]).decode()


def test_each_row_follows_its_grammar() -> None:
    said = [text(tokens) for request, tokens in zip(requests(), alone(), strict=True) if request.grammar]
    for answer in said[:2]:
        animal = json.loads(answer)
        assert set(animal) == set(SCHEMA["properties"])  # type: ignore[call-overload]
        assert isinstance(animal["legs"], int) and animal["kind"] in ("cat", "dog")
    assert all(re.fullmatch(r"[a-f]{3}-[0-9]{2,4}", answer) for answer in said[2:4])
    assert all(answer in ("yes", "no", "maybe not") for answer in said[4:6])
    assert all(re.fullmatch(r"<[a-z]{1,5}>", answer) for answer in said[6:])


def test_the_grammar_makes_the_difference() -> None:
    """A negative control: the same requests without their grammars do not happen to follow them."""
    free = [attrs.evolve(request, grammar=None) for request in requests() if request.grammar]
    bound = [tokens for request, tokens in zip(requests(), alone(), strict=True) if request.grammar]
    assert all(tokens != other for tokens, other in zip(bound, answers(engine(), free), strict=True))


def test_d1_d3_grammars_in_the_batch() -> None:
    """Together, and joining one after another: as alone."""
    assert answers(engine(), requests()) == alone()
    later = [attrs.evolve(request, join=place % 5) for place, request in enumerate(requests())]
    assert answers(engine(), later, 16) == alone()


@pytest.mark.parametrize("gone", [0, 5])
def test_d5_one_that_leaves_changes_nobody(gone: int) -> None:
    leaving = [attrs.evolve(request, leave=6) if place == gone else request for place, request in enumerate(requests())]
    told = answers(engine(), leaving)
    assert [tokens for place, tokens in enumerate(told) if place != gone] == [
        tokens for place, tokens in enumerate(alone()) if place != gone
    ]


def test_min_tokens_keeps_the_end_away() -> None:
    words = smollm().tokenizer
    ends = tuple(sorted(words.eos_token_ids))
    prompt = words.encode_chat([{"role": "user", "content": "Say hi."}])
    [plain] = answers(engine(), [Request(prompt, 40)])
    [held] = answers(engine(), [Request(prompt, 40, min_tokens=35, ends=ends)])
    first = next(place for place, token in enumerate(plain) if token in ends)
    assert first < 35, "it would have ended"
    assert not set(held[:35]) & set(ends)
    assert held[:first] == plain[:first]
