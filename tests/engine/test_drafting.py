"""What n-grams foretell."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.engine.spec_decode.prompt_lookup import (
    CANDIDATES,
    INDEXED_AT_ONCE,
    RESUMED,
    SUBSTITUTED,
    NgramProposer,
)

Tokens = Sequence[int]
few = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def naive(tokens: Tokens, least: int, most: int) -> tuple[int, int]:
    """(length of the longest match, the newest place that it stands before), of the newest places
    of the least n-gram."""
    ends = [
        end for end in range(least, len(tokens)) if tokens[end - least : end] == tokens[-least:]
    ]
    found = (0, 0)
    for end in reversed(ends[-CANDIDATES:]):
        length = next(
            (
                n
                for n in range(least, min(most, end))
                if tokens[end - n - 1] != tokens[len(tokens) - n - 1]
            ),
            min(most, end),
        )
        if length > found[0]:
            found = length, end
    return found


@given(few, st.integers(1, 4), st.integers(0, 4), st.integers(1, 12))
def test_the_longest_match_is_gone_on_with(
    tokens: list[int], least: int, more: int, wanted: int
) -> None:
    proposer = NgramProposer(tokens, least, least + more)
    length, place = naive(tokens, least, least + more)
    assert proposer.matched == length
    draft = proposer.draft(wanted)
    assert len(draft) == min(wanted, length)
    whole = [*tokens]
    for token in draft:
        assert token == whole[place]
        whole.append(token)
        place += 1


@given(few, st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=10), st.integers(1, 4))
def test_whatever_is_foretold_stood_somewhere_before(
    prompt: list[int], said: list[list[int]], least: int
) -> None:
    """Whenever it is asked, and however much came at a time."""
    proposer, tokens = NgramProposer(prompt, least, 8), [*prompt]
    for more in said:
        proposer.append(more)
        tokens += more
        draft = proposer.draft(8)
        assert len(draft) <= 8 and (len(draft) >= least) == bool(draft)
        assert set(draft) <= set(tokens)
        assert proposer.draft(8) == draft


@given(st.lists(st.integers(0, 9), min_size=3, max_size=7), st.integers(0, 6))
def test_what_repeats_is_foretold_to_any_length(period: list[int], into: int) -> None:
    tokens = (period * 8)[: 7 * len(period) + into]
    proposer = NgramProposer(tokens[:5], 3, 8)
    for token in tokens[5:]:
        proposer.append([token])
        proposer.draft(1)
    draft = proposer.draft(20)
    assert len(draft) > 7
    assert [*tokens, *draft] == (period * 16)[: len(tokens) + len(draft)]


def test_a_long_match_is_followed_beyond_a_token_that_differs() -> None:
    """One word of a text is changed: the copy goes on behind it."""
    text = list(range(100, 130))
    proposer = NgramProposer(text, 3, 8)
    proposer.append(text[:3])
    assert proposer.draft(9) == text[3:6]
    proposer.append(text[3 : SUBSTITUTED + 2])
    assert proposer.matched >= SUBSTITUTED
    proposer.append([7])
    assert proposer.matched == RESUMED
    assert proposer.draft(3) == text[SUBSTITUTED + 3 : SUBSTITUTED + 6]
    proposer.append([8])
    assert proposer.matched == 0, "but not beyond two"


@pytest.mark.parametrize(
    ("prompt", "draft"), [([1], []), ([1, 2], [1, 2, 5]), ([1, 2, 3], [1, 2, 3, 5])]
)
def test_prompts_shorter_than_an_ngram(prompt: list[int], draft: list[int]) -> None:
    proposer = NgramProposer(prompt, 3, 8)
    assert proposer.draft(4) == []
    proposer.append([5, *prompt, 5])
    assert proposer.draft(4) == draft


def test_a_token_costs_the_same_in_a_long_row() -> None:
    """Counted in places that are looked at, not in seconds."""
    dice = random.Random(1)
    looked = []

    class Counted(NgramProposer):
        def _match(self, place: int) -> int:
            looked.append(place)
            return super()._match(place)

    proposer = Counted([dice.randrange(3) for _ in range(5000)], 3, 8)
    for _ in range(200):
        proposer.append([dice.randrange(3)])
        proposer.draft(8)
    assert len(looked) <= 201 * CANDIDATES


def test_no_call_indexes_all_of_a_long_prompt() -> None:
    """The end of the prompt repeats its beginning. The first call finds that, and later ones what
    else the prompt has."""
    prompt = [*range(3 * INDEXED_AT_ONCE), *range(8)]
    proposer = NgramProposer(prompt, 3, 8)
    indexed = []
    for token in range(8, 12):
        assert proposer.draft(4) == [token, token + 1, token + 2, token + 3]
        indexed.append(len(proposer._before))
        proposer.append([token])
    assert max(after - before for before, after in pairwise([0, *indexed])) <= INDEXED_AT_ONCE + 3
    assert indexed[-1] >= len(prompt)
    proposer.append([3 * INDEXED_AT_ONCE - 20 + at for at in range(8)])
    assert proposer.draft(2) == [3 * INDEXED_AT_ONCE - 12, 3 * INDEXED_AT_ONCE - 11]
