"""Prompts that cannot fit are refused before they are tokenized, and none that fits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import ByteTokenizer, card
from trouper import ChatPrompt, RequestFailed, Settings, TextPrompt, TokenPrompt
from trouper.actors.runtime.prompt_tokenizing import (
    LONG_TEXT,
    MIN_CHARACTERS,
    PROBED_CHARACTERS,
    check_length,
    is_short,
    max_prompt_tokens_of,
    tokenize_together,
    tokens_of,
)
from trouper.protocol.requests import PairPrompt


class Words(ByteTokenizer):
    """A token for each word of up to `longest_token` letters, and what it was asked to tokenize."""

    longest_token = 20

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        self.asked.append(text)
        size = self.longest_token
        return tuple(
            len(word[at : at + size])
            for word in text.split(" ")
            for at in range(0, max(len(word), 1), size)
        )


def refusal(text: str, most: int, tokenizer: ByteTokenizer) -> RequestFailed:
    with pytest.raises(RequestFailed) as refused:
        check_length(text, tokenizer, most, "messages")
    assert refused.value.problem.param == "messages"
    assert refused.value.problem.code == "context_length_exceeded"
    return refused.value


@pytest.mark.parametrize("bad", ["x" * 5000, "\ud83d", "broken"])
def test_texts_of_which_one_is_to_be_refused_are_not_tokenized_together(bad: str) -> None:
    class Breaking(ByteTokenizer):
        def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
            assert text != "broken"
            return super().encode(text)

    good: list[TextPrompt | PairPrompt] = [TextPrompt("a"), PairPrompt("b", "c")]
    assert tokenize_together(good, Breaking(), 100) == [((97,), 0), ((98, 99), 1)]
    assert tokenize_together([*good, TextPrompt(bad)], Breaking(), 100) == []


def test_what_so_many_tokens_cannot_stand_for_is_not_tokenized_at_all() -> None:
    words = Words()
    said = refusal("x" * (100 * 40 + 1), 100, words).problem.message
    assert not words.asked
    assert "4001 characters" in said and "4000" in said and "100 tokens" in said


def test_a_tokenizer_may_drop_some_of_a_text() -> None:
    """Its longest token is a byte, and yet a text may be longer than one for each."""
    check_length("x" * (10 * MIN_CHARACTERS), ByteTokenizer(), 10, "prompt")
    refusal("x" * (10 * MIN_CHARACTERS + 1), 10, ByteTokenizer())


def test_of_a_text_that_is_likely_too_long_only_the_beginning_is_tokenized() -> None:
    words, most = Words(), 5000
    said = refusal("word " * 18_000, most, words).problem.message
    assert [len(text) for text in words.asked] == [most * PROBED_CHARACTERS]
    assert f"the first {most * PROBED_CHARACTERS} of 90000 characters" in said


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 4000))
def test_nothing_that_fits_is_refused(lengths: list[int], times: int) -> None:
    words, text = Words(), " ".join("x" * length for length in lengths * times)
    found = len(words.encode(text))
    check_length(text, words, found, "prompt")


@pytest.mark.parametrize(
    ("prompt", "short"),
    [
        (TextPrompt("x" * LONG_TEXT), True),
        (TextPrompt("x" * (LONG_TEXT + 1)), False),
        (TokenPrompt((1,) * 100_000), True),
        (ChatPrompt(({"role": "user", "content": "x"},)), True),
        (ChatPrompt(({"role": "user", "content": "x" * LONG_TEXT},)), False),
        (
            ChatPrompt(
                ({"role": "user", "content": "x"},), {"tools": [{"description": "x" * LONG_TEXT}]}
            ),
            False,
        ),
        (ChatPrompt(({"role": "user", "content": "x"},), {"values": [1] * LONG_TEXT}), False),
        (ChatPrompt(({"role": "user", "content": "x"},), {"y" * LONG_TEXT: 1}), False),
    ],
)
def test_which_prompts_are_tokenized_at_once(prompt: Any, short: bool) -> None:
    assert is_short(prompt) == short


def test_a_prompts_room_is_the_least_of_all_bounds() -> None:
    for settings, most in (
        (Settings(), 4096),
        (Settings(max_kv_size=100), 100),
        (Settings(max_prompt_tokens=50), 50),
    ):
        assert max_prompt_tokens_of(card(), settings) == most


def test_a_template_that_gives_text_is_bounded_by_it() -> None:
    """And its tokens are those of the text, without what the tokenizer puts around one."""

    class Renders(ByteTokenizer):
        def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
            return (0, *super().encode(text)) if special else super().encode(text)

        def render_chat(self, messages: Any, kwargs: Any) -> str:
            return "".join(message["content"] for message in messages) * int(kwargs["times"])

    prompt = ChatPrompt(({"role": "user", "content": "ab"},), {"times": 2})
    assert tokens_of(prompt, Renders(), 100) == tuple(b"abab")
    with pytest.raises(RequestFailed) as refused:
        tokens_of(ChatPrompt(prompt.messages, {"times": 10_000}), Renders(), 100)
    assert refused.value.problem.param == "messages"
