"""Where the tokens of a choice begin in its text: `text_offset` of log-probabilities."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable

from trouper.protocol.model import Tokenizer

UTF8 = getincrementaldecoder("utf-8")


class TextOffsets:
    """Offsets in characters, which never lie beyond the text. A token within a character has the
    offset of that character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = UTF8("replace")
        self._end = 0

    def of_prompt(self, tokens: Iterable[int], text: str) -> list[int]:
        """Return the offsets of the prompt's tokens. Its text need not have all that they stand
        for: a token that the tokenizer adds in front (BOS), and the space that sentencepiece adds
        to the first word."""
        offsets = []
        for token in tokens:
            offsets.append(self._end)
            piece = self._decoder.decode(self._tokenizer.token_bytes(token))
            special = "" if piece else self._special(token)
            if special and text.startswith(special, self._end):
                piece = special
            elif self._end == 0 and piece.startswith(" ") and not text.startswith(" "):
                piece = piece[1:]
            self._end = min(self._end + len(piece), len(text))
        self._end = len(text)
        self._decoder.reset()
        return offsets

    def of_answer(self, tokens: Iterable[int]) -> list[int]:
        """Return the offsets of the answer's next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._end)
            self._end += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return offsets

    def _special(self, token: int) -> str:
        """Text of a special token; nothing for one that is a part of a character."""
        return "" if self._tokenizer.token_bytes(token) else self._tokenizer.token_text(token)
