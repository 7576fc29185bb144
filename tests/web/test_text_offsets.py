"""Where tokens begin in the text that a completion returns."""

from __future__ import annotations

from typing import cast

import pytest

from trouper.protocol.model import Tokenizer
from trouper.web.openai.completion_dialect import TextOffsets

PIECES = ("<s>", b" Hi", b" \xf0\x9f\x98", b"\x80", b"!", b" the", b"\xc3", b"re")


class Pieces:
    """A tokenizer whose first token is special."""

    def token_bytes(self, token: int) -> bytes:
        piece = PIECES[token]
        return piece if isinstance(piece, bytes) else b""

    def token_text(self, token: int) -> str:
        piece = PIECES[token]
        return piece if isinstance(piece, str) else piece.decode(errors="backslashreplace")


@pytest.fixture
def offsets() -> TextOffsets:
    return TextOffsets(cast(Tokenizer, Pieces()))


@pytest.mark.parametrize(
    ("tokens", "text", "expected"),
    [
        ((1, 2, 3, 4), " Hi \U0001f600!", [0, 3, 4, 5]),
        ((0, 1, 4), " Hi!", [0, 0, 3]),
        ((0, 1, 4), "Hi!", [0, 0, 2]),
        ((0, 1, 4), "<s> Hi!", [0, 3, 6]),
        ((1, 0, 1, 4), " Hi<s> Hi!", [0, 3, 6, 9]),
        ((1, 1, 1), " Hi", [0, 3, 3]),
    ],
    ids=[
        "half characters",
        "BOS",
        "BOS and sentencepiece's space",
        "written",
        "written within",
        "other text",
    ],
)
def test_of_a_prompt(
    offsets: TextOffsets, tokens: tuple[int, ...], text: str, expected: list[int]
) -> None:
    assert offsets.of_prompt(tokens, text) == expected
    assert offsets.of_answer([5]) == [len(text)], "the answer begins where the prompt ends"


def test_of_an_answer_in_parts(offsets: TextOffsets) -> None:
    """Found by use: a token of half a character counted as many characters as its escapes have."""
    assert offsets.of_answer([1, 2]) == [0, 3]
    assert offsets.of_answer([3, 4]) == [4, 5]
    assert offsets.of_answer([6, 7, 4]) == [6, 6, 9], "a character that never ends is one"
