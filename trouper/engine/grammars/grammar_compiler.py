"""Compiles and caches grammars for llguidance (https://github.com/guidance-ai/llguidance)."""

from __future__ import annotations

import json
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from math import inf
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import attrs
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from trouper.engine.grammars.followed_schema import followed
from trouper.engine.grammars.lru_cache import LruCache
from trouper.engine.grammars.schema_faults import path_of_fault, too_wide
from trouper.engine.grammars.token_masks import Constraint, Mask, mask_bytes, reason_of
from trouper.engine.grammars.trial_process import (
    SMALL,
    TrialFailedError,
    TrialPool,
    TrialUnavailableError,
)
from trouper.protocol.grammar import Grammar, GrammarKind
from trouper.protocol.problems import Problem, RequestFailed, bad_request
from trouper.system import heap

BLANKS = r"[ \t\r\n]{1,40}"
"""Whitespace between the tokens of JSON. Without a bound some models write blanks for ever."""
LARK_LIMITS = LLParserLimits(max_items_in_row=300)
"""An ambiguous Lark grammar makes masks slow: with 2000 items a third of a second each."""
LIMITS = LLParserLimits()
"""Limits for JSON schemas: an optional property takes four items."""
MAX_CALL_BLANKS = 8
"""Maximum number of blanks between the marker of a call and the object."""
MAX_CALL_HEADER = 64
"""Maximum number of characters between the marker of a call and the tool's name. DeepSeek's header
has 41."""
ANYTHING = "( <[*]> )*"
FINAL = '"<|channel|>final<|message|>"'
"""harmony's prefix of an answer."""
THOUGHT = (
    'thought: THOUGHT\nTHOUGHT: "<|channel|>analysis<|message|>" /([^<]|<+[^<|])*<*/ '
    '"<|end|><|start|>assistant"'
)
"""Harmony's reasoning up to the next marker."""
COMPILE_S = 10.0
SLOW_BYTES = 4 * 2**20
"""Bound of the cache of grammars that took too long to compile."""
RECENT_BYTES = 32 * 2**20
"""Bound of the cache of unused compiled grammars."""
BYTES_PER_CHARACTER = 500
REGEX_BYTES = 2 * 2**20
"""Minimum size of a regular expression, which grows while rows use it: `(.*a.{300}b)+` to 70 MB."""


Key = tuple[Hashable, ...]


class TokenizerVocabulary:
    """llguidance's interface of a tokenizer: the bytes of each token, and the special ones."""

    def __init__(
        self, pieces: Sequence[bytes], specials: Mapping[int, str], eos: Sequence[int], encode: Any
    ) -> None:
        self.tokens = [
            b"\xff" + specials[i].encode()
            if i in specials
            else piece or f"\xff<unused {i}>".encode("latin-1")
            for i, piece in enumerate(pieces)
        ]
        self.special_token_ids = sorted(specials)
        self.eos_token_id = eos[0]
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return list(
            self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)
        )


@attrs.frozen(eq=False)
class CompiledGrammar:
    """A compiled grammar. Rows copy `matcher`."""

    matcher: LLMatcher
    nbytes: int
    """An estimate: llguidance reports none."""


class Grammars:
    """Grammars over one vocabulary, cached by content.

    Compiling takes up to seconds, on a worker thread before admission. Callers keep the result of
    `compile` until the row starts: the cache may evict.
    """

    def __init__(self, vocabulary: TokenizerVocabulary, size: int, eos: Sequence[int]) -> None:
        """`size`: number of logits, which may be padded."""
        self._vocabulary, self._size, self._eos = vocabulary, size, list(eos)
        self._recent = LruCache[CompiledGrammar | str](RECENT_BYTES)
        self._live: WeakValueDictionary[Key, CompiledGrammar] = WeakValueDictionary()
        self._making = Lock()
        self._slow = LruCache[tuple[str, float]](SLOW_BYTES)
        """Faults of slow grammars, and when each is forgotten."""
        self._trials = TrialPool(self._described)
        self.compiled_inline = 0
        """Number of grammars that the engine's thread compiled."""

    @cached_property
    def _tokens(self) -> TokenizerVocabulary:
        vocabulary = self._vocabulary
        vocabulary.tokens += [
            f"\xff<unused {i}>".encode("latin-1") for i in range(len(vocabulary.tokens), self._size)
        ]
        return vocabulary

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(self._tokens), n_vocab=self._size, eos_token=self._eos)

    def _described(self) -> dict[str, Any]:
        vocabulary = self._tokens
        tokens = [token.decode("latin-1") for token in vocabulary.tokens]
        return {"tokens": tokens, "specials": vocabulary.special_token_ids, "eos": self._eos}

    @property
    def mask_bytes(self) -> int:
        """Bytes of one row's mask."""
        return mask_bytes(self._size)

    def compile(self, grammar: Grammar, timeout_s: float = COMPILE_S) -> CompiledGrammar:
        """Compile a grammar, or return the cached one. Raises `RequestFailed`: 400 that names the
        faulty part or the limit, 503 without a process."""
        found = self.known(grammar)
        return self._add(grammar, timeout_s) if found is None else found

    def known(self, grammar: Grammar) -> CompiledGrammar | None:
        """Return the cached grammar. Raises `RequestFailed` (400) for a cached fault."""
        key = _key(grammar)
        found = self._live.get(key) or self._recent.get(key)
        fault, until = self._slow.get(key) or ("", 0.0)
        if found is None and time.monotonic() < until:
            found = fault
        if isinstance(found, str):
            raise cannot_be_followed(grammar, found)
        if found is not None:
            self._live[key] = found
        return found

    def _add(self, grammar: Grammar, timeout_s: float) -> CompiledGrammar:
        """Raises `RequestFailed`."""
        key = _key(grammar)
        try:
            found = self._compile(grammar, timeout_s)
        except TrialUnavailableError as unavailable:
            raise _no_process(grammar, unavailable) from None
        except TrialFailedError as failed:
            found = f"\0{failed}; make it smaller or flatter"
            if failed.kept_s < inf:
                until = time.monotonic() + failed.kept_s
                self._slow.put(key, (found, until), len(found) + len(grammar.source))
                raise cannot_be_followed(grammar, found) from None
        size = found.nbytes if isinstance(found, CompiledGrammar) else len(found)
        self._recent.put(key, found, size + len(grammar.source))
        if isinstance(found, str):
            raise cannot_be_followed(grammar, found)
        self._live[key] = found
        return found

    def _compile(self, grammar: Grammar, timeout_s: float) -> CompiledGrammar | str:
        """Return the grammar, or the fault as path, NUL character, reason. Raises
        `TrialFailedError`, `TrialUnavailableError`."""
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
        matcher.compute_bitmask()  # The first mask is slow; copies reuse the work.
        if len(text) > SMALL:
            heap.give_back()
        minimum = REGEX_BYTES if _has_regex(grammar) else 0
        return CompiledGrammar(matcher, max(len(text) * BYTES_PER_CHARACTER, minimum))

    def _fault(self, grammar: Grammar, text: str, timeout_s: float) -> str:
        """Return the fault, or "". Raises `TrialFailedError`, `TrialUnavailableError`."""
        return reason_of(self._trials.fault(text, _limits(grammar).max_items_in_row, timeout_s))

    def _fault_path(self, grammar: Grammar, end: float) -> str:
        """Return the path of a schema's fault, if found in time; else ""."""

        def is_wrong(part: Any) -> bool:
            part_grammar = Grammar("json_schema", json.dumps(part))
            return bool(self._fault(part_grammar, self._text(part_grammar), end - time.monotonic()))

        if grammar.kind == "json_schema":
            with suppress(RecursionError, ValueError, TrialFailedError, TrialUnavailableError):
                return path_of_fault(json.loads(grammar.source), is_wrong)
        return ""

    def _matcher(self, grammar: Grammar, text: str) -> LLMatcher:
        with self._making:
            tokenizer = self._tokenizer
        return LLMatcher(tokenizer, text, log_level=0, limits=_limits(grammar))

    def constraint(
        self, grammar: Grammar, min_tokens: int = 0, ends: Sequence[int] = ()
    ) -> Constraint:
        """Make one row's constraint. No token of `ends` is allowed before `min_tokens` tokens,
        unless no other is."""
        key = _key(grammar)
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
        if grammar.calls:
            return LLMatcher.grammar_from_lark(_with_calls(grammar))
        text = Grammars._plain_text(grammar)
        return _in_final_channel(grammar.kind, text) if grammar.channels else text

    @staticmethod
    def _plain_text(grammar: Grammar) -> str:
        match grammar.kind:
            case "json_object":
                return _of_schema('{"type": "object"}')
            case "json_schema":
                return _of_schema(grammar.source)
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.source)
            case "choice":
                return LLMatcher.grammar_from_lark(f"start: {_options(grammar.source)}")
            case "lark":
                return LLMatcher.grammar_from_lark(grammar.source)


def _key(grammar: Grammar) -> Key:
    """Make the key of grammars that compile alike."""
    return (
        grammar.kind,
        grammar.source,
        grammar.calls,
        grammar.call_names,
        grammar.call_key,
        grammar.channels,
    )


def _has_regex(grammar: Grammar) -> bool:
    return grammar.kind in ("regex", "lark") or '"pattern' in grammar.source


def _options(source: str) -> str:
    """Return a Lark grammar's alternatives. Raises `ValueError` without any."""
    options = json.loads(source)
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise ValueError("it must be a JSON array of strings")
    if not options:
        raise ValueError("it has no option")
    return " | ".join(json.dumps(option, ensure_ascii=False) for option in options)


def _with_calls(grammar: Grammar) -> str:
    """Return a Lark grammar of the text or a call. A call's object is followed to the end, other
    calls up to the name: parsers repair more than a grammar would allow."""
    answer = (
        _options(grammar.source)
        if grammar.kind == "choice"
        else _json_rule(grammar.source or '{"type": "object"}')
    )
    rules = [f"way_0: {FINAL} ({answer})", THOUGHT] if grammar.channels else [f"way_0: {answer}"]
    for index, marker in enumerate(grammar.calls, 1):
        start = json.dumps(marker, ensure_ascii=False)
        if grammar.call_key:
            before = f"{start} /[ \\t\\r\\n]{{0,{MAX_CALL_BLANKS}}}/" if marker else ""
            rules.append(f"way_{index}: {before} {_json_rule(_call_schema(grammar))} {ANYTHING}")
        else:
            header = (
                f"{start} /(?s:.{{0,{MAX_CALL_HEADER}}})/ "
                f"({_options(json.dumps(grammar.call_names))})"
            )
            rules += [
                f"way_{index}: name_{index} {ANYTHING}",
                f"name_{index}[lazy]: NAME_{index}",
                f"NAME_{index}: {header}",
            ]
    ways = " | ".join(f"way_{index}" for index in range(len(grammar.calls) + 1))
    return "\n".join(
        [f"start: thought? ({ways})" if grammar.channels else f"start: {ways}", *rules]
    )


def _in_final_channel(kind: GrammarKind, text: str) -> str:
    nested = (
        [{"lark_grammar": text}] if kind in ("lark", "choice") else json.loads(text)["grammars"]
    )
    nested[0]["name"] = "answer"
    return json.dumps(
        {"grammars": [{"lark_grammar": f"start: thought? {FINAL} @answer\n{THOUGHT}"}, *nested]}
    )


def _call_schema(grammar: Grammar) -> str:
    properties = {"name": {"enum": grammar.call_names}, grammar.call_key: {"type": "object"}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return json.dumps(schema)


def _json_rule(source: str) -> str:
    options = {"x-guidance": {"whitespace_pattern": BLANKS}}
    return f"%json {json.dumps(options | json.loads(followed(source)))}"


def cannot_be_followed(grammar: Grammar, fault: str) -> RequestFailed:
    """Make the error of a faulty grammar. `fault`: path, NUL character, reason."""
    path, _, reason = fault.partition("\0")
    where = grammar.param + path
    return bad_request(f"{where} cannot be followed: {reason}", where, "invalid_grammar")


def _no_process(grammar: Grammar, unavailable: TrialUnavailableError) -> RequestFailed:
    message = f"{grammar.param} could not be compiled: {unavailable}; try again soon"
    return RequestFailed(
        Problem(503, message, "server_error", grammar.param, "system_shortage", retry_after_s=1)
    )


def _of_schema(source: str) -> str:
    """The schema `false` takes no options."""
    options = {"whitespace_pattern": BLANKS} if source.startswith("{") else None
    return LLMatcher.grammar_from_json_schema(followed(source), defaults=options)  # type: ignore[arg-type]


def _limits(grammar: Grammar) -> LLParserLimits:
    return LARK_LIMITS if grammar.kind == "lark" else LIMITS
