"""Grammars over a real vocabulary, row by row in one batch: every answer follows its own, and no
row changes another.

A step of this model takes a tenth of a second for one row or for all, so everything is played
together and few tokens long; tests/real compares with rows alone, and has the many cases.
"""

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
        "legs": {"type": "integer", "minimum": 0, "maximum": 100},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["legs", "kind"],
    "additionalProperties": False,
}
HOT = Sampling(temperature=1.0, seed=7)
GRAMMARS = (
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", r"[a-f]{3}-[0-9]{2,4}"),
    Grammar("choice", '["yes", "no", "maybe not"]'),
    Grammar("lark", 'start: "<" /[a-z]{1,5}/ ">"'),
)
LENGTHS = (26, 10, 5, 8)


def engine() -> StepEngine:
    loaded = smollm()
    return StepEngine(loaded.model, loaded.card.vocab_size, grammars=loaded.tokenizer.grammars)


def requests() -> list[Request]:
    """Each grammar greedy and hot, between rows of other kinds. Plain texts as prompts: they are
    short."""
    free = [
        Request(prompts()[8], 8, HOT),
        Request(
            prompts()[9],
            8,
            attrs.evolve(GREEDY, logit_bias=((260, 4.0),)),
            min_tokens=6,
            ends=(0, 2),
        ),
    ]
    bound = [
        Request(
            prompts()[10 + len(GRAMMARS) * hot // 2 + n // 2],
            length,
            HOT if hot else GREEDY,
            grammar=grammar,
        )
        for hot in (False, True)
        for n, (grammar, length) in enumerate(zip(GRAMMARS, LENGTHS, strict=True))
    ]
    return [*bound[:4], *free, *bound[4:]]


@cache
def together() -> list[list[int]]:
    return answers(engine(), requests())


def text(tokens: list[int]) -> str:
    words = smollm().tokenizer
    ends = [place for place, token in enumerate(tokens) if token in words.eos_token_ids]
    assert ends, "a grammar that is complete ends"
    return b"".join(words.token_bytes(token) for token in tokens[: ends[0]]).decode()


def test_each_row_follows_its_grammar() -> None:
    said = [
        text(tokens)
        for request, tokens in zip(requests(), together(), strict=True)
        if request.grammar
    ]
    for answer in said[::4]:
        animal = json.loads(answer)
        assert set(animal) == set(SCHEMA["properties"])  # type: ignore[call-overload]
        assert isinstance(animal["legs"], int) and animal["kind"] in ("cat", "dog")
    assert all(re.fullmatch(r"[a-f]{3}-[0-9]{2,4}", answer) for answer in said[1::4])
    assert all(answer in ("yes", "no", "maybe not") for answer in said[2::4])
    assert all(re.fullmatch(r"<[a-z]{1,5}>", answer) for answer in said[3::4])


def test_the_grammar_makes_the_difference() -> None:
    """A negative control: the same requests without their grammars do not happen to follow them."""
    free = [
        attrs.evolve(request, grammar=None, tokens=3) for request in requests() if request.grammar
    ]
    bound = [
        tokens for request, tokens in zip(requests(), together(), strict=True) if request.grammar
    ]
    assert all(
        tokens[:3] != other for tokens, other in zip(bound, answers(engine(), free), strict=True)
    )


@pytest.mark.long
def test_d1_d3_d5_joining_and_leaving_changes_nobody() -> None:
    """One after another, and two of them gone before their end."""
    gone = {0: 7, 5: 6}
    script = [
        attrs.evolve(request, join=place % 5, leave=gone.get(place))
        for place, request in enumerate(requests())
    ]
    for place, (mine, wanted) in enumerate(
        zip(answers(engine(), script, 16), together(), strict=True)
    ):
        assert mine == (wanted[: len(mine)] if place in gone else wanted), script[place]
        assert len(mine) > 2


def test_min_tokens_keeps_the_end_away() -> None:
    """The model would say that the capital of France is Paris, and end."""
    words = smollm().tokenizer
    ends = tuple(sorted(words.eos_token_ids))
    plain, held = answers(
        engine(), [Request(prompts()[0], 12, min_tokens=least, ends=ends) for least in (0, 10)]
    )
    first = next(place for place, token in enumerate(plain) if token in ends)
    assert first < 10, "it would have ended"
    assert not set(held[:10]) & set(ends)
    assert held[:first] == plain[:first]
