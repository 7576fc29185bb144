"""Chats as people have them: many at a time, some of which go back and say something else. Almost
nothing is computed twice.

The minimum is what a perfect cache would compute: of each prompt what goes beyond its longest
common beginning with anything that was computed before, and at least its last token, whose logits
are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import attrs
import pytest
import trio

from tests.families import END
from tests.family_configs import LONG
from tests.reuse.serving import Served, Tiny, Tokens, serving, text
from trouper import Generate, Sampling, TokenPrompt

CONVERSATIONS, TURNS, AT_ONCE = (30, 8, 15) if LONG else (10, 5, 5)
GOES_BACK = 0.2
"""How often somebody takes back what was said since an earlier turn."""
USER, ASSISTANT = (END - 1, 1), (END - 1, 2)
"""What a chat template writes before a message."""
SYSTEMS = [(END - 1, 3, *text(200, seed), END) for seed in range(3)]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
        min(len(a), len(b)),
    )


@attrs.define
class Perfect:
    """A cache that forgets nothing and finds everything."""

    known: list[Tokens] = attrs.field(factory=list)
    computed: int = 0

    def prompt(self, prompt: Tokens) -> None:
        self.computed += max(
            1, len(prompt) - max((common(prompt, each) for each in self.known), default=0)
        )
        self.known.append(prompt)

    def answered(self, whole: Tokens) -> None:
        self.known.append(whole)


@attrs.frozen
class Turn:
    """What was said, and the whole text up to the end of the answer."""

    message: Tokens
    whole: Tokens


def next_message(chance: Random, turns: list[Turn], seed: int) -> Tokens:
    """Mostly another one. Who goes back (and forgets what came since) says something else there, or
    asks for another answer to the same, or changes the end of what was said."""
    message = text(chance.randrange(20, 61), seed)
    if len(turns) < 2 or chance.random() > GOES_BACK:
        return message
    place = chance.randrange(len(turns))
    before = turns[place].message
    del turns[place:]
    kept = chance.choice((0, 0, 0, len(before), len(before) // 2))
    return before if kept == len(before) else before[:kept] + message[kept:]


async def talk(served: Served, perfect: Perfect, place: int, free: trio.CapacityLimiter) -> None:
    """One conversation. Its answers are as long as chance says, and end as answers do."""
    chance, turns = Random(place), list[Turn]()
    for number in range(TURNS):
        message = next_message(chance, turns, 1000 * place + number)
        before = turns[-1].whole if turns else SYSTEMS[place % len(SYSTEMS)]
        prompt = (*before, *USER, *message, END, *ASSISTANT)
        length = chance.randrange(10, 31)
        async with free:
            perfect.prompt(prompt)
            with await served.runtime.submit(wish(prompt, length)) as answer:
                tokens = tuple([token async for delta in answer for token in delta.tokens])
        assert len(tokens) == length + 1 and tokens[-1] == END
        turns.append(Turn(message, (*prompt, *tokens)))
        perfect.answered(turns[-1].whole)


def wish(prompt: Tokens, length: int) -> Generate:
    """An answer of so many tokens, and then the end of its turn: random models never stop by
    themselves."""
    ends = Sampling(temperature=0, logit_bias=((END, 1e4),))
    return Generate(
        request_id="talk",
        prompt=TokenPrompt(prompt),
        sampling=ends,
        max_tokens=200,
        min_tokens=length,
    )


def test_the_perfect_cache_by_hand() -> None:
    perfect = Perfect()
    for prompt, computed in [
        ((1, 2, 3), 3),
        ((1, 2, 3), 1),
        ((1, 2), 1),
        ((1, 2, 4, 5), 2),
        ((2, 2), 2),
    ]:
        before = perfect.computed
        perfect.prompt(prompt)
        assert perfect.computed - before == computed
    perfect.answered((2, 2, 8, 9))
    perfect.prompt((2, 2, 8, 7, 7))
    assert perfect.computed == 9 + 2


@pytest.mark.parametrize(
    ("name", "bound"),
    [("llama", 1.02), ("gemma3_text", 1.1), ("mamba2", 1.1), ("falcon_h1", 1.1)],
)
@pytest.mark.long(but=("llama-*", "mamba2-*"))
async def test_almost_nothing_is_computed_twice(name: str, tiny: Tiny, bound: float) -> None:
    perfect, free = Perfect(), trio.CapacityLimiter(AT_ONCE)
    async with serving(tiny, snapshot_tokens=512) as served:
        async with trio.open_nursery() as nursery:
            for place in range(CONVERSATIONS):
                nursery.start_soon(talk, served, perfect, place, free)
        facts = served.stats
    told = (
        f"{facts.total_prefill_tokens} tokens computed, {perfect.computed} needed, "
        f"{facts.total_cached_tokens} reused"
    )
    assert perfect.computed <= facts.total_prefill_tokens <= bound * perfect.computed, told
    assert facts.cache.snapshots <= 2.1 * CONVERSATIONS * TURNS, (
        "one at a prompt's end and one at its answer's"
    )


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2"])
async def test_short_questions_about_a_long_text(name: str, tiny: Tiny) -> None:
    """A snapshot at the end of a prompt does not spare the one where prompts depart, or where their
    first turn ends, however close these are. Without a turn it is the second question that shows
    where they depart."""
    document = text(100, 1)
    async with serving(tiny, snapshot_tokens=512) as served:
        cached = [(await served.one(document + text(4, 10 + place))).cached for place in range(3)]
        assert cached == [0, tiny.reach(100, 0), 100]
        cached = [
            (await served.one((*SYSTEMS[0], *text(4, 20 + place)))).cached for place in range(3)
        ]
        assert cached == [0, len(SYSTEMS[0]), len(SYSTEMS[0])]
