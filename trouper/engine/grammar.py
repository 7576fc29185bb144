"""Structured output: which tokens a row may have next, by llguidance (https://github.com/guidance-ai/llguidance).

A matcher follows one row's text and fills a bit mask of its vocabulary, some 50 us a row; bits become booleans on the
device by a table of 256 bytes, which every backend of MLX can do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper as Wrapped

from trouper.protocol.errors import bad_request
from trouper.protocol.grammar import Grammar

BITS = mx.array(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.bool_))
"""(256, 8): the bits of each byte, lowest first."""


class Vocabulary:
    """What llguidance wants to know of a tokenizer: the bytes of each token, and which are special."""

    def __init__(self, pieces: Sequence[bytes], specials: Mapping[int, str], eos: Sequence[int], encode: Any) -> None:
        self.tokens = [
            b"\xff" + specials[i].encode() if i in specials else piece or f"\xff<unused {i}>".encode("latin-1")
            for i, piece in enumerate(pieces)
        ]
        self.special_token_ids = sorted(specials)
        self.eos_token_id = eos[0]
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return list(self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text))


class Grammars:
    """Grammars over one vocabulary. Making the first one takes a second for large vocabularies."""

    def __init__(self, vocabulary: Vocabulary, size: int, eos: Sequence[int]) -> None:
        """`size`: of the logits, which may be padded beyond the vocabulary."""
        self._vocabulary, self._size, self._eos = vocabulary, size, list(eos)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        words = self._vocabulary
        words.tokens += [f"\xff<unused {i}>".encode("latin-1") for i in range(len(words.tokens), self._size)]
        return LLTokenizer(Wrapped(words), n_vocab=self._size, eos_token=self._eos)

    @property
    def mask_bytes(self) -> int:
        """Of one row."""
        return (self._size + 31) // 32 * 4

    def check(self, grammar: Grammar) -> None:
        """Raises `RequestFailed` (400) that names the place."""
        failed, said = LLMatcher.validate_grammar_with_warnings(self._text(grammar), self._tokenizer)
        if failed:
            reason = "; ".join(said).strip().splitlines()[0]
            raise bad_request(f"{grammar.param} cannot be followed: {reason}", grammar.param, "invalid_grammar")

    def constraint(self, grammar: Grammar) -> Constraint:
        return Constraint(LLMatcher(self._tokenizer, self._text(grammar), log_level=0), self._eos[0])

    @staticmethod
    def _text(grammar: Grammar) -> str:
        match grammar.kind:
            case "json_object":
                return LLMatcher.grammar_from_json_schema('{"type": "object"}')
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(grammar.source)
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.source)
            case "choice":
                options = " | ".join(json.dumps(option, ensure_ascii=False) for option in json.loads(grammar.source))
                return LLMatcher.grammar_from_lark(f"start: {options}")
            case "lark":
                return LLMatcher.grammar_from_lark(grammar.source)


class Constraint:
    """One row's place in its grammar."""

    def __init__(self, matcher: LLMatcher, eos: int) -> None:
        self._matcher, self._eos = matcher, eos

    def took(self, token: int) -> str:
        """The row's next token; what went wrong, or ""."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            return str(self._matcher.get_error() or "the grammar does not go on")
        return ""

    def allowed(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Packed bits, (size,) bytes. What is complete can only end."""
        if self._matcher.is_stopped():
            mask = np.zeros(size, np.uint8)
            mask[self._eos // 8] = 1 << (self._eos % 8)
            return mask
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[:size]


def masked(logits: mx.array, places: mx.array, packed: np.ndarray[Any, np.dtype[np.uint8]]) -> mx.array:
    """logits (n, V) with -inf where the rows at `places` (k,) may not go; `packed` (k, bytes)."""
    allowed = BITS[mx.array(packed)].reshape(packed.shape[0], -1)[:, : logits.shape[1]]
    shaped = logits.astype(mx.float32)
    shaped[places] = mx.where(allowed, shaped[places], -mx.inf)
    return shaped
