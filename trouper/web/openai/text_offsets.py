"""`text_offset` of log-probabilities, in characters."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable

from trouper.protocol.model import Tokenizer

UTF8 = getincrementaldecoder("utf-8")


class TextOffsets:
    """Offsets never exceed the text. A token within a character has the character's offset."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = UTF8("replace")
        self._end = 0

    def of_prompt(self, tokens: Iterable[int], text: str) -> list[int]:
        """The prompt's text may lack BOS and sentencepiece's space before the first word."""
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
        offsets = []
        for token in tokens:
            offsets.append(self._end)
            self._end += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return offsets

    def _special(self, token: int) -> str:
        return "" if self._tokenizer.token_bytes(token) else self._tokenizer.token_text(token)
