"""Compiles and caches grammars for llguidance (https://github.com/guidance-ai/llguidance)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
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
from trouper.engine.grammars.schema_documents import (
    ROOT,
    Location,
    SchemaDocument,
    documents_of,
    with_documents,
)
from trouper.engine.grammars.schema_faults import (
    DROPPABLE,
    SchemaFaultError,
    depth_of,
    fault_of,
    relaxed_by_trials,
    too_wide,
)
from trouper.engine.grammars.token_masks import Constraint, LruCache, Mask, mask_bytes, reason_of
from trouper.engine.grammars.trial_process import (
    SMALL,
    TrialFailedError,
    TrialPool,
    TrialUnavailableError,
)
from trouper.protocol.grammar import CallSchema, FollowedGrammar, Grammar, GrammarKind
from trouper.protocol.problems import Problem, RequestFailed, bad_request
from trouper.system import heap

INDENT = 4
MAX_INDENT = 40  # Number of blanks of a level of JSON, and of the deepest one, behind a line break.

# An ambiguous Lark grammar makes masks slow: with 2000 items a third of a second each.
LARK_LIMITS = LLParserLimits(max_items_in_row=300)
LIMITS = LLParserLimits()  # Limits for JSON schemas: an optional property takes four items.
MAX_CALL_BLANKS = 8  # Maximum number of blanks between the marker of a call and the object.

# Maximum number of characters between the marker of a call and the tool's name. DeepSeek's header
# has 41.
MAX_CALL_HEADER = 64
ANYTHING = "( <[*]> )*"
ANY_OBJECT = '{"type": "object"}'
FINAL = '"<|channel|>final<|message|>"'  # harmony's prefix of an answer.

# Harmony's reasoning up to the next marker.
THOUGHT = (
    'thought: THOUGHT\nTHOUGHT: "<|channel|>analysis<|message|>" /([^<]|<+[^<|])*<*/ '
    '"<|end|><|start|>assistant"'
)
COMPILE_S = 10.0
MIN_TRIAL_S = 1.0  # Minimum time to compile a schema of which all but the type was dropped.
UNLESS_STRICT = "; leave it out, or ask without strict, which drops and names it"
SLOW_BYTES = 4 * 2**20
"""Bound of the cache of grammars that took too long to compile."""
RECENT_BYTES = 32 * 2**20
"""Bound of the cache of unused compiled grammars."""
BYTES_PER_CHARACTER = 500

# Minimum size of a regular expression, which grows while rows use it: `(.*a.{300}b)+` to 70 MB.
REGEX_BYTES = 2 * 2**20


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
    grammar: Grammar
    dropped: tuple[Location, ...] = ()
    """Places of dropped keywords."""


@attrs.frozen
class GrammarFault:
    reason: str
    location: Location = ROOT

    @property
    def nbytes(self) -> int:
        return len(self.reason) + sum(map(len, self.location.steps))


class GrammarFaultError(ValueError):
    def __init__(self, reason: str, location: Location = ROOT) -> None:
        super().__init__(reason)
        self.fault = GrammarFault(reason, location)


class Grammars:
    """Grammars over one vocabulary, cached by content.

    Compiling takes up to seconds, on a worker thread before admission. Callers keep the result
    until the row starts: the cache may evict.
    """

    def __init__(self, vocabulary: TokenizerVocabulary, size: int, eos: Sequence[int]) -> None:
        """`size`: number of logits, which may be padded."""
        self._vocabulary, self._size, self._eos = vocabulary, size, list(eos)
        self._recent = LruCache[CompiledGrammar | GrammarFault](RECENT_BYTES)
        self._live: WeakValueDictionary[Grammar, CompiledGrammar] = WeakValueDictionary()
        self._making = Lock()
        self._slow = LruCache[tuple[GrammarFault, float]](SLOW_BYTES)
        self._trials = TrialPool(self._described)
        self.compiled_inline = 0
        """Grammars that the engine's thread compiled."""

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
        return mask_bytes(self._size)

    def compile(self, grammar: Grammar, timeout_s: float = COMPILE_S) -> FollowedGrammar:
        """Compile a grammar, or return the cached one. Raises `RequestFailed`: 400 that names the
        faulty part or the limit, 503 without a process."""
        found = self.known(grammar)
        return self._add(grammar, timeout_s) if found is None else found

    def known(self, grammar: Grammar) -> FollowedGrammar | None:
        """Return the cached grammar. Raises `RequestFailed` (400) for a cached fault."""
        key = _key(grammar)
        found = self._live.get(key) or self._recent.get(key)
        fault, until = self._slow.get(key) or (None, 0.0)
        if found is None and time.monotonic() < until:
            found = fault
        return None if found is None else self._kept(grammar, found)

    def _kept(self, grammar: Grammar, found: CompiledGrammar | GrammarFault) -> FollowedGrammar:
        if isinstance(found, GrammarFault):
            raise cannot_be_followed(grammar, found)
        self._live[_key(grammar)] = self._live[_key(found.grammar)] = found
        return FollowedGrammar(
            attrs.evolve(found.grammar, param=grammar.param),
            tuple(location.shown(grammar) for location in found.dropped),
            found,
        )

    def _add(self, grammar: Grammar, timeout_s: float) -> FollowedGrammar:
        key = _key(grammar)
        try:
            found = self._compile(grammar, timeout_s)
        except TrialUnavailableError as unavailable:
            raise _no_process(grammar, unavailable) from None
        except TrialFailedError as failed:
            found = GrammarFault(f"{failed}; make it smaller or flatter")
            if failed.kept_s < inf:
                until = time.monotonic() + failed.kept_s
                self._slow.put(key, (found, until), found.nbytes + len(grammar.source))
                raise cannot_be_followed(grammar, found) from None
        self._recent.put(key, found, found.nbytes + len(grammar.source))
        return self._kept(grammar, found)

    def _compile(self, grammar: Grammar, timeout_s: float) -> CompiledGrammar | GrammarFault:
        dropped: tuple[Location, ...] = ()
        try:
            grammar, dropped = self._followable(grammar, timeout_s)
        except GrammarFaultError as error:
            return error.fault
        except (ValueError, RecursionError) as error:  # nested too deeply, or a number that is none
            return GrammarFault(reason_of(str(error)))
        text = self._text(grammar)
        matcher = self._matcher(grammar, text)
        matcher.compute_bitmask()  # The first mask is slow; copies reuse the work.
        if len(text) > SMALL:
            heap.give_back()
        minimum = REGEX_BYTES if _has_regex(grammar) else 0
        size = max(len(text) * BYTES_PER_CHARACTER, minimum)
        return CompiledGrammar(matcher, size, grammar, dropped)

    def _followable(
        self, grammar: Grammar, timeout_s: float
    ) -> tuple[Grammar, tuple[Location, ...]]:
        """Return the grammar without what may be dropped, and the locations. Raises
        `GrammarFaultError`, `ValueError`, `RecursionError`, `TrialFailedError`,
        `TrialUnavailableError`."""
        end = time.monotonic() + timeout_s
        documents = [document.relaxed() for document in documents_of(grammar)]
        for document in documents:
            if wide := too_wide(document.schema):
                raise GrammarFaultError(wide[1], document.at(wide[0]))
        found = with_documents(grammar, documents)
        try:
            reason = self._fault(found, timeout_s)
            if reason and documents:
                documents = [self._tried(document, reason, end) for document in documents]
                found = with_documents(grammar, documents)
                reason = self._fault(found, end - time.monotonic())
        except TrialFailedError:
            if all(document.strict for document in documents):
                raise
            documents = [one if one.strict else one.free() for one in documents]
            found = with_documents(grammar, documents)
            reason = self._fault(found, max(timeout_s, MIN_TRIAL_S))
        if reason:
            raise GrammarFaultError(reason)
        return found, tuple(location for document in documents for location in document.dropped)

    def _tried(self, document: SchemaDocument, reason: str, end: float) -> SchemaDocument:
        """Return the schema without what llguidance rejects. Raises `GrammarFaultError` for what
        may not be dropped, `TrialFailedError`, `TrialUnavailableError`."""

        def is_wrong(part: Any) -> bool:
            part_grammar = Grammar("json_schema", json.dumps(part))
            return bool(self._fault(part_grammar, end - time.monotonic()))

        if not document.strict:
            try:
                return document.without(*relaxed_by_trials(document.schema, is_wrong))
            except SchemaFaultError as error:
                raise GrammarFaultError(reason, document.at(error.fault.path)) from None
        location = None
        with suppress(RecursionError, ValueError, TrialFailedError, TrialUnavailableError):
            if not is_wrong(document.schema):
                return document
            location = document.location
            fault = fault_of(document.schema, is_wrong)
            location = document.at(fault.path)
            reason += UNLESS_STRICT if fault.keyword in DROPPABLE else ""
        raise GrammarFaultError(reason, location or document.location)

    def _fault(self, grammar: Grammar, timeout_s: float) -> str:
        try:
            text = self._text(grammar)
        except (ValueError, RecursionError) as error:
            return reason_of(str(error))
        items = _limits(grammar).max_items_in_row
        return reason_of(self._trials.fault(text, items, timeout_s))

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
                return _of_schema(ANY_OBJECT, compact=grammar.compact)
            case "json_schema":
                return _of_schema(grammar.source, compact=grammar.compact)
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.source)
            case "choice":
                return LLMatcher.grammar_from_lark(f"start: {_options(grammar.source)}")
            case "lark":
                return LLMatcher.grammar_from_lark(grammar.source)
            case "calls":
                return LLMatcher.grammar_from_lark(_calls_of(json.loads(grammar.source)))


def _key(grammar: Grammar) -> Grammar:
    """Parameters with the same grammar share it."""
    return attrs.evolve(grammar, param="")


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
    """Return a Lark grammar of the text or a call."""
    # A call's object is followed to the end, other calls up to the name: parsers repair more than a
    # grammar would allow.
    answer = (
        _options(grammar.source)
        if grammar.kind == "choice"
        else _json_rule(grammar.source or ANY_OBJECT, compact=grammar.compact)
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


def _calls_of(calls: Sequence[CallSchema]) -> str:
    """Return a Lark grammar of one call, with fixed text around the arguments."""
    rules = [f"start: {' | '.join(f'call_{index}' for index in range(len(calls)))}"]
    for index, call in enumerate(calls):
        name = json.dumps(call["name"], ensure_ascii=False)
        opening = json.dumps(f'{{"name": {name}, "arguments": ', ensure_ascii=False)
        rules.append(f'call_{index}: {opening} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: {_json_rule(json.dumps(call['parameters']))}")
    return "\n".join(rules)


def _json_rule(source: str, *, compact: bool = False) -> str:
    schema = json.loads(followed(source))
    if not isinstance(schema, dict):  # It takes no options.
        return f"%json {json.dumps(schema)}"
    return f"%json {json.dumps({'x-guidance': _blanks(schema, compact=compact)} | schema)}"


def _of_schema(source: str, *, compact: bool) -> str:
    source = followed(source)
    schema = json.loads(source)
    options = _blanks(schema, compact=compact) if isinstance(schema, dict) else None
    return LLMatcher.grammar_from_json_schema(source, defaults=options)  # type: ignore[arg-type]


def _blanks(schema: Any, *, compact: bool) -> dict[str, Any]:
    """Return llguidance's options of whitespace: a blank, or a line break and indentation to the
    schema's depth."""
    # Without a bound some models write blanks for ever.
    if compact:
        return {"whitespace_flexible": False}
    depth = depth_of(schema)
    indent = MAX_INDENT if depth is None else min(INDENT * depth, MAX_INDENT)
    return {"whitespace_pattern": rf"[ \t]|\r?\n[ \t]{{0,{indent}}}"}


def cannot_be_followed(grammar: Grammar, fault: GrammarFault) -> RequestFailed:
    where, tool = fault.location.path(grammar), fault.location.tool
    of_tool = f" (tool {tool!r})" if tool else ""
    return bad_request(
        f"{where}{of_tool} cannot be followed: {fault.reason}", where, "invalid_grammar"
    )


def _no_process(grammar: Grammar, unavailable: TrialUnavailableError) -> RequestFailed:
    message = f"{grammar.param} could not be compiled: {unavailable}; try again soon"
    return RequestFailed(
        Problem(503, message, "server_error", grammar.param, "system_shortage", retry_after_s=1)
    )


def _limits(grammar: Grammar) -> LLParserLimits:
    return LARK_LIMITS if grammar.kind == "lark" else LIMITS
