"""Structured output: which tokens a row may have next, by llguidance (https://github.com/guidance-ai/llguidance).

A matcher follows one row's text and fills a bit mask of its vocabulary, some 50 us a row; bits become booleans on the
device by a table of 256 bytes, which every backend of MLX can do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import attrs
import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper as Wrapped

from trouper import heap
from trouper.engine.grammars.lru_cache import LruCache
from trouper.engine.grammars.schema_faults import path_of_fault, too_wide
from trouper.engine.grammars.trial_process import SMALL, TrialFailedError, TrialProcess
from trouper.protocol.grammar import Grammar
from trouper.protocol.problems import RequestFailed, bad_request

BITS = mx.array(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.bool_))
"""(256, 8): the bits of each byte, lowest first."""
BLANKS = r"[ \t\r\n]{1,40}"
"""Between the tokens of JSON: enough for any indentation. Without an end some models write blanks for ever."""
LARK_LIMITS = LLParserLimits(max_items_in_row=300)
"""An ambiguous grammar makes masks dear for everybody in the batch: with llguidance's 2000, a third of a second each."""
LIMITS = LLParserLimits()
"""An object takes four items for each property that is not required, and may have hundreds."""
COMPILE_S = 10.0
RECENT_BYTES = 64 * 2**20
"""Bound of the cache of compiled grammars that no request uses."""
BYTES_PER_CHARACTER = 500
Mask = np.ndarray[Any, np.dtype[np.uint8]]
"""Packed bits, lowest first."""


def mask_bytes(vocabulary: int) -> int:
    """Of one row of so many logits: whole words of 32 bits."""
    return (vocabulary + 31) // 32 * 4


class TokenizerVocabulary:
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


@attrs.frozen(eq=False)
class CompiledGrammar:
    """A grammar that is ready to be followed: rows follow copies of `matcher`, which has seen no token."""

    matcher: LLMatcher
    nbytes: int
    """An estimate: llguidance does not report it."""


class Grammars:
    """Grammars over one vocabulary. Compiled ones are kept, and found again by their content.

    Compiling takes from a millisecond to seconds, so it is done before a request is admitted, on a thread that nobody waits for
    (`compile`); the engine's thread only copies what is there. What `compile` returns must be kept until the row is in the
    engine: the bound on what is kept may have forgotten the grammar by then.
    """

    def __init__(self, vocabulary: TokenizerVocabulary, size: int, eos: Sequence[int]) -> None:
        """`size`: of the logits, which may be padded beyond the vocabulary."""
        self._vocabulary, self._size, self._eos = vocabulary, size, list(eos)
        self._recent = LruCache[CompiledGrammar | str](RECENT_BYTES)
        self._live: WeakValueDictionary[tuple[str, str], CompiledGrammar] = WeakValueDictionary()
        self._making = Lock()
        self._trials = TrialProcess(self._described), TrialProcess(self._described)
        self.compiled_inline = 0
        """Grammars that the engine's thread had to compile itself, since nobody had before."""

    @cached_property
    def _tokens(self) -> TokenizerVocabulary:
        vocabulary = self._vocabulary
        vocabulary.tokens += [f"\xff<unused {i}>".encode("latin-1") for i in range(len(vocabulary.tokens), self._size)]
        return vocabulary

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(Wrapped(self._tokens), n_vocab=self._size, eos_token=self._eos)

    def _described(self) -> dict[str, Any]:
        vocabulary = self._tokens
        tokens = [token.decode("latin-1") for token in vocabulary.tokens]
        return {"tokens": tokens, "specials": vocabulary.special_token_ids, "eos": self._eos}

    @property
    def mask_bytes(self) -> int:
        """Of one row."""
        return mask_bytes(self._size)

    def compile(self, grammar: Grammar, timeout_s: float = COMPILE_S) -> CompiledGrammar:
        """Raises `RequestFailed` (400) that names the place, or the bound that was passed."""
        key = grammar.kind, grammar.source
        found = self._live.get(key) or self._recent.get(key)
        if found is None:
            try:
                found = self._compile(grammar, timeout_s)
            except TrialFailedError as failed:
                found = f"\0{failed}; make it smaller or flatter"
                if failed.slow:
                    raise cannot_be_followed(grammar, found) from None
            size = found.nbytes if isinstance(found, CompiledGrammar) else len(found)
            self._recent.put(key, found, size + len(grammar.source))
        if isinstance(found, str):
            raise cannot_be_followed(grammar, found)
        self._live[key] = found
        return found

    def _compile(self, grammar: Grammar, timeout_s: float) -> CompiledGrammar | str:
        """The compiled grammar, or its fault as place, zero, reason. Raises `TrialFailedError`."""
        end = time.monotonic() + timeout_s
        try:
            text = self._text(grammar)
            if grammar.kind == "json_schema" and (wide := too_wide(json.loads(grammar.source))):
                return "\0".join(wide)
            reason = self._fault(grammar, text, timeout_s)
        except (ValueError, RecursionError) as error:  # nested too deeply, or a number that is none
            reason = reason_of(str(error))
        if reason:
            return f"{self._fault_path(grammar, end)}\0{reason}"
        matcher = self._matcher(grammar, text)
        matcher.compute_bitmask()  # The first one is dear, and copies have what it found.
        if len(text) > SMALL:
            heap.give_back()
        return CompiledGrammar(matcher, len(text) * BYTES_PER_CHARACTER)

    def _fault(self, grammar: Grammar, text: str, timeout_s: float) -> str:
        """Why it cannot be followed, or "". Raises `TrialFailedError`."""
        trial = self._trials[len(grammar.source) > SMALL]  # A small one never waits for a large one.
        return reason_of(trial.fault(text, _limits(grammar).max_items_in_row, timeout_s))

    def _fault_path(self, grammar: Grammar, end: float) -> str:
        """Place of the fault in a schema, if it is found in time; else ""."""

        def is_wrong(part: Any) -> bool:
            part_grammar = Grammar("json_schema", json.dumps(part))
            return bool(self._fault(part_grammar, self._text(part_grammar), end - time.monotonic()))

        if grammar.kind == "json_schema":
            with suppress(RecursionError, ValueError, TrialFailedError):
                return path_of_fault(json.loads(grammar.source), is_wrong)
        return ""

    def _matcher(self, grammar: Grammar, text: str) -> LLMatcher:
        with self._making:
            tokenizer = self._tokenizer
        return LLMatcher(tokenizer, text, log_level=0, limits=_limits(grammar))

    def constraint(self, grammar: Grammar, min_tokens: int = 0, ends: Sequence[int] = ()) -> Constraint:
        """None of `ends` comes before `least` tokens, unless nothing else may."""
        key = grammar.kind, grammar.source
        found = self._live.get(key) or self._recent.get(key)
        if not isinstance(found, CompiledGrammar):
            self.compiled_inline += 1
            matcher = self._matcher(grammar, self._text(grammar))
        else:
            matcher = found.matcher.deep_copy()
        return Constraint(matcher, self._packed(self._eos[:1]), min_tokens, self._packed(ends))

    def _packed(self, tokens: Sequence[int]) -> Mask:
        bits = np.zeros(self.mask_bytes * 8, np.bool_)
        bits[[token for token in tokens if token < self._size]] = True
        return np.packbits(bits, bitorder="little")

    @staticmethod
    def _text(grammar: Grammar) -> str:
        match grammar.kind:
            case "json_object":
                return _of_schema('{"type": "object"}')
            case "json_schema":
                return _of_schema(grammar.source)
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.source)
            case "choice":
                options = " | ".join(json.dumps(option, ensure_ascii=False) for option in json.loads(grammar.source))
                return LLMatcher.grammar_from_lark(f"start: {options}")
            case "lark":
                return LLMatcher.grammar_from_lark(grammar.source)


def cannot_be_followed(grammar: Grammar, fault: str) -> RequestFailed:
    """`fault`: the place in it, a zero, and why."""
    path, _, reason = fault.partition("\0")
    where = grammar.param + path
    return bad_request(f"{where} cannot be followed: {reason}", where, "invalid_grammar")


def _of_schema(source: str) -> str:
    """`false` takes no options."""
    options = {"whitespace_pattern": BLANKS} if source.startswith("{") else None
    return LLMatcher.grammar_from_json_schema(source, defaults=options)  # type: ignore[arg-type]


def _limits(grammar: Grammar) -> LLParserLimits:
    return LARK_LIMITS if grammar.kind == "lark" else LIMITS


def reason_of(message: str) -> str:
    """One line: the first, and what a regular expression's drawing of the place ends with."""
    first, *remaining = message.strip().splitlines() or [""]
    return " ".join([first, *(line.removeprefix("error: ") for line in remaining if line.startswith("error: "))])


class Constraint:
    """One row's place in its grammar."""

    def __init__(self, matcher: LLMatcher, eos: Mask, min_tokens: int, ends: Mask) -> None:
        self._matcher, self._eos, self._min_tokens, self._ends = matcher, eos, min_tokens, ends

    @property
    def fault(self) -> str:
        """Why it cannot be followed any further, or "". What it allows then means nothing."""
        return reason_of(self._matcher.get_error()) if self._matcher.is_error() else ""

    def took(self, token: int) -> str:
        """The row's next token; what went wrong, or ""."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            return self.fault or "the grammar does not go on"
        return ""

    def fitting(self, draft: Sequence[int]) -> int:
        """How many of these tokens may come next, one after another."""
        return 0 if self._matcher.is_stopped() else self._matcher.validate_tokens(list(draft))

    def along(self, draft: Sequence[int], drawn: int) -> list[Mask]:
        """What is allowed before each of these tokens, and after the last; fewer if it cannot be followed so far. A
        copy of the matcher goes there (1.4 us), since one that gave up could not come back."""
        masks, scout = (
            [self.allowed(drawn)],
            Constraint(self._matcher.deep_copy(), self._eos, self._min_tokens, self._ends),
        )
        for index, token in enumerate(draft, 1):
            if scout.took(token):
                break
            mask = scout.allowed(drawn + index)
            if scout.fault:
                break
            masks.append(mask)
        return masks

    def allowed(self, drawn: int) -> Mask:
        """After so many tokens. What is complete can only end."""
        stopped = self._matcher.is_stopped()
        mask = self._eos if stopped else np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(self._eos)]
        if drawn >= self._min_tokens:
            return mask
        remaining = mask & ~self._ends
        return remaining if remaining.any() else mask


def masked(logits: mx.array, rows: mx.array, packed: Mask) -> mx.array:
    """logits (n, V) with -inf where the rows at `places` (k,) may not go; `packed` (k, bytes)."""
    allowed = BITS[mx.array(packed)].reshape(packed.shape[0], -1)[:, : logits.shape[1]]
    if packed.shape[0] == logits.shape[0]:  # All of them: two copies of the logits less, two thirds of the time.
        return mx.where(allowed, logits, -mx.inf)
    shaped = logits.astype(mx.float32)
    shaped[rows] = mx.where(allowed, shaped[rows], -mx.inf)
    return shaped
