"""Wrapper of a Hugging Face tokenizer: text to tokens, tokens to bytes."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, cast

import attrs
from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from trouper.engine.grammars.grammar_compiler import COMPILE_S, Grammars, TokenizerVocabulary
from trouper.engine.loading.control_tokens import BREAK, ControlTokens, unescaped
from trouper.engine.loading.infill_detection import infill_tokens_of
from trouper.engine.loading.message_adaptation import Message
from trouper.engine.loading.ordinary_tokens import OrdinaryEncoder
from trouper.engine.loading.output_format_detection import OutputFormat, detect, overridden
from trouper.engine.loading.sequence_breakers import breakers_of
from trouper.engine.loading.template_probe import TemplateReport, probe
from trouper.engine.loading.token_bytes import TokenTable, token_table
from trouper.engine.loading.tokenizer_files import (
    apply_template,
    inner_tokenizer,
    open_tokenizer,
    put_into_lower_case,
)
from trouper.engine.loading.tokenizer_trial import LONGEST_BYTES, try_tokenizer
from trouper.engine.platform.error_text import is_of_library, line_of
from trouper.protocol.grammar import FollowedGrammar, Grammar
from trouper.protocol.model import InfillTokens
from trouper.protocol.output_formats import AUTO
from trouper.protocol.paths import exists
from trouper.protocol.plans import Breakers
from trouper.protocol.problems import ModelUnusable, bad_request
from trouper.protocol.requests import PairTokens
from trouper.storage.checkpoint_files import read_json
from trouper.storage.foreign_files import require_content
from trouper.system import heap

TEMPLATE_FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""`raise_exception` raises TemplateError, deep nesting in `tojson` RecursionError, the sandbox's
range OverflowError."""
Config = Mapping[str, Any]
MAX_BREAKERS = 64
"""Some 10 kB each."""
HUGE_TEXT = 2**20
"""Characters beyond which an encoding's memory is given back."""
TRIAL = " One\n\ttrial, <s> of 1234 wörds: 词</s> "
"""Text that a changed tokenizer encodes otherwise than its tokenizer.json."""
TEMPLATE = PreTrainedTokenizerFast.apply_chat_template


class Fast(Protocol):
    def __call__(
        self, texts: Sequence[str | tuple[str, str]], *, add_special_tokens: bool
    ) -> Sequence[Any]: ...


@attrs.frozen(eq=False, slots=False)
class HubTokenizer:
    """Implements `protocol.model.Tokenizer`."""

    eos_token_ids: frozenset[int]
    has_chat_template: bool
    _wrapped: TokenizerWrapper
    _bytes: tuple[bytes, ...]
    _specials: Mapping[int, str]
    grammars: Grammars | None = None
    grammar_end: int | None = None
    template: TemplateReport = attrs.field(factory=TemplateReport)
    _breakers: dict[tuple[str, ...], Breakers] = attrs.field(factory=dict, init=False)
    output_format: OutputFormat = attrs.field(factory=OutputFormat)
    controls: ControlTokens | None = None
    """None: special tokens in the texts of messages stay special tokens."""
    image_text: tuple[str, str] = ("", "")
    """The template's marker of an image, and what the family's processor makes of it."""

    @property
    def vocabulary(self) -> dict[str, int]:
        found: dict[str, int] = self._wrapped.get_vocab()
        return found

    @cached_property
    def longest_token(self) -> int:
        return max(map(len, self._bytes), default=1)

    @cached_property
    def _fast(self) -> Fast | None:
        """None if tokenizer.json is not all. `encode_batch_fast` releases the GIL and makes no
        offsets, which take ten times the ids' memory."""
        wrapped = inner_tokenizer(self._wrapped)
        if not isinstance(wrapped, PreTrainedTokenizerFast):
            return None
        backend = wrapped.backend_tokenizer
        if backend.truncation is not None or backend.padding is not None:
            return None
        fast = cast(Fast, backend.encode_batch_fast)
        for special in (False, True):
            ids = fast([TRIAL], add_special_tokens=special)[0].ids
            if ids != wrapped.encode(TRIAL, add_special_tokens=special):
                return None
        return fast

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        if BREAK in text and self.controls is not None:
            return self._encode_parts(text, self.controls)
        with _panics_refused():
            if self._fast is None:
                return tuple(self._wrapped.encode(text, add_special_tokens=special))
            ids = self._fast([text], add_special_tokens=special)[0].ids
        if len(text) > HUGE_TEXT:
            heap.give_back()
        return tuple(ids)

    def encode_pair(self, first: str, second: str) -> tuple[tuple[int, ...], int]:
        with _panics_refused():
            # As lists: a single pair with an empty second text would be encoded as one text.
            encoded = inner_tokenizer(self._wrapped)([first], [second], return_token_type_ids=True)
        return tuple(encoded["input_ids"][0]), _second_at(encoded["token_type_ids"][0])

    def encode_batch(self, texts: Sequence[str | tuple[str, str]]) -> list[PairTokens]:
        if self._fast is None or any(BREAK in text for text in texts):
            return [
                (self.encode(text), 0) if isinstance(text, str) else self.encode_pair(*text)
                for text in texts
            ]
        with _panics_refused():
            encoded = self._fast(texts, add_special_tokens=True)
        return [
            (tuple(one.ids), 0 if isinstance(text, str) else _second_at(one.type_ids))
            for text, one in zip(texts, encoded, strict=True)
        ]

    def _encode_parts(self, text: str, controls: ControlTokens) -> tuple[int, ...]:
        """Encode what lies between two of the template's control tokens without any, if a break
        says that one of them is a client's."""
        plain, own, clients = controls.spans(text)
        tokens: list[int] = []
        written = behind = 0
        for start, end in (*own, (len(plain), len(plain))):
            following = bisect_left(clients, behind)
            if following < len(clients) and clients[following] < start:
                with _panics_refused():
                    ordinary = self._ordinary.encode(plain[behind:start], first=not behind)
                tokens += (*self.encode(plain[written:behind], special=False), *ordinary)
                written = start
            behind = end
        return (*tokens, *self.encode(plain[written:], special=False))

    @cached_property
    def _ordinary(self) -> OrdinaryEncoder:
        assert self.controls is not None
        return OrdinaryEncoder(self._wrapped, self.controls.texts)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> tuple[int, ...]:
        """The template writes special tokens itself (F1)."""
        rendered = self.render_chat(messages, kwargs)
        if rendered is None:
            return tuple(self._templated(messages, {**kwargs, "tokenize": True}, None))
        return self.encode(rendered, special=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
    ) -> str | None:
        if type(inner_tokenizer(self._wrapped)).apply_chat_template is not TEMPLATE:
            return None
        rendered = str(self._templated(messages, {**kwargs, "tokenize": False}, self.controls))
        # A marker in a client's text is broken up.
        return rendered.replace(*self.image_text) if self.image_text[0] else rendered

    def _templated(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        controls: ControlTokens | None,
    ) -> Any:
        try:
            if controls is not None:
                options = {name: controls.break_up(value) for name, value in options.items()}
            adapted = self.template.adaptation.adapted(
                messages, controls.break_message if controls is not None else None
            )
            _require_default(self._wrapped, options)
            with _panics_refused():
                rendered = apply_template(self._wrapped, adapted, options)
            return rendered if controls is None else unescaped(rendered, (adapted, options))
        except TEMPLATE_FAULTS as error:
            also = (
                ""
                if self.template.fault is None
                else "; it renders no question at all, and /v1/completions needs no template"
            )
            message = str(error).replace(BREAK, "")
            raise bad_request(
                f"the model's chat template refuses these messages: {message}{also}", "messages"
            ) from error

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def token_text(self, token: int) -> str:
        return self._specials.get(token) or self.token_bytes(token).decode(
            errors="backslashreplace"
        )

    @property
    def thinking(self) -> tuple[str, str] | None:
        return self.output_format.thinking

    @property
    def tool_parser(self) -> str | None:
        return self.output_format.tool_parser

    @property
    def unread_calls(self) -> bool:
        return self.output_format.unread

    @property
    def reasoning_parser(self) -> str | None:
        return self.output_format.reasoning_parser

    def marker_tokens(self, marker: str) -> tuple[int, ...]:
        return tuple(self._wrapped.encode(marker, add_special_tokens=False))

    @cached_property
    def infill(self) -> InfillTokens | None:
        return infill_tokens_of(self.vocabulary)

    def breakers(self, breakers: tuple[str, ...]) -> Breakers:
        found = self._breakers.get(breakers)
        if found is None:
            found = breakers_of(
                breakers, self._bytes, partial(self._wrapped.encode, add_special_tokens=False)
            )
            if len(self._breakers) < MAX_BREAKERS:
                self._breakers[breakers] = found
        return found

    @property
    def calling(self) -> tuple[str, str] | None:
        return self.output_format.calling

    def parse_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        parse = self.output_format.parse
        assert parse is not None, "the format has a parser of its own"
        found = parse(text, list(tools))
        return [_call(call) for call in (found if isinstance(found, list) else [found])]

    def compile_grammar(self, grammar: Grammar, timeout_s: float = COMPILE_S) -> FollowedGrammar:
        assert self.grammars is not None, "the model is not loaded"
        return self.grammars.compile(grammar, timeout_s)

    def known_grammar(self, grammar: Grammar) -> FollowedGrammar | None:
        assert self.grammars is not None, "the model is not loaded"
        return self.grammars.known(grammar)

    def with_grammars(self, logits: int) -> HubTokenizer:
        """`logits`: number of logits. A model without a known end token gets the last token without
        text as end of grammars."""
        known = [token for token in sorted(self.eos_token_ids) if token < logits]
        eos = known or [
            next(
                (token for token in reversed(range(logits)) if not self.token_bytes(token)),
                logits - 1,
            )
        ]
        encode = partial(self._wrapped.encode, add_special_tokens=False)
        vocabulary = TokenizerVocabulary(self._bytes, self._specials, eos, encode)
        return attrs.evolve(
            self, grammars=Grammars(vocabulary, logits, eos), grammar_end=None if known else eos[0]
        )


def _second_at(types: list[int]) -> int:
    return types.index(1) if 1 in types else 0


@contextmanager
def _panics_refused() -> Iterator[None]:
    """A Rust panic after backtracking is no `Exception` and would end the server."""
    try:
        yield
    except BaseException as panic:
        if isinstance(panic, Exception) or not is_of_library(panic):
            raise
        raise bad_request(f"the model's tokenizer fails on this text: {line_of(panic)}") from panic


def _call(call: Mapping[str, Any]) -> tuple[str, str]:
    arguments = call.get("arguments", {})
    return str(call["name"]), arguments if isinstance(arguments, str) else json.dumps(
        arguments, ensure_ascii=False
    )


def _visible(table: TokenTable, markers: AbstractSet[str]) -> TokenTable:
    """Make markers of thinking and calls visible: parsers search text."""
    shown = {
        token: text
        for token, text in table.specials.items()
        if text and any(text in marker for marker in markers)
    }
    pieces = list(table.pieces)
    for token, text in shown.items():
        pieces[token] = text.encode()
    return TokenTable(
        tuple(pieces), {token: text for token, text in table.specials.items() if token not in shown}
    )


def wrapped_tokenizer(directory: Path) -> TokenizerWrapper:
    """Raises `ModelUnusable` and exceptions of the libraries."""
    try_tokenizer(directory)
    return open_tokenizer(directory)


def load(
    directory: Path,
    *configs: Config,
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    special_tokens_in_content: bool = False,
    lower_case: bool = False,
) -> HubTokenizer:
    """`configs` may name further end tokens. `lower_case`: texts are put into lower case first.
    Raises `ModelUnusable`."""
    try:
        wrapped = wrapped_tokenizer(directory)
        if lower_case:
            put_into_lower_case(wrapped)
        has_template = bool(wrapped.has_chat_template)
        render = partial(_rendered, wrapped)
        sees = any("vision_config" in config for config in configs)
        template = probe(render, images=sees) if has_template else TemplateReport()
        detected = detect(wrapped, render, template)
        output_format = overridden(detected, tool_parser, reasoning_parser)
        formats = (detected, output_format)
        controls = None if special_tokens_in_content else ControlTokens.of(wrapped, formats)
        table = _visible(token_table(wrapped), output_format.markers)
    except ModelUnusable:
        raise
    except BaseException as error:
        # Libraries may raise any exception over any file.
        if not is_of_library(error):
            raise
        if exists(path := directory / "tokenizer.json"):
            require_content(path)
            read_json(path, LONGEST_BYTES)
        raise ModelUnusable(f"{directory} has no usable tokenizer: {line_of(error)}") from error
    return HubTokenizer(
        eos_token_ids=frozenset(wrapped.eos_token_ids).union(*map(eos_ids, configs)),
        has_chat_template=has_template,
        wrapped=wrapped,
        bytes=table.pieces,
        specials=table.specials,
        template=template,
        output_format=output_format,
        controls=controls,
    )


def _rendered(
    wrapped: TokenizerWrapper, messages: Sequence[Message], options: Mapping[str, Any]
) -> str:
    """Raises any exception of a template, and `TypeError` for a result that is no text."""
    _require_default(wrapped, options)
    rendered = apply_template(wrapped, messages, {"tokenize": False, **options})
    if not isinstance(rendered, str):
        raise TypeError("the template gives no text")
    return rendered


def _require_default(wrapped: TokenizerWrapper, options: Mapping[str, Any]) -> None:
    """Raises `LookupError` without a template for these options."""
    templates = wrapped.chat_template
    named = isinstance(templates, dict) and "default" not in templates
    if named and not (options.get("tools") is not None and "tool_use" in templates):
        raise LookupError(
            f"of its templates ({', '.join(sorted(templates))}) none is named default"
        )


def eos_ids(config: Config) -> frozenset[int]:
    """An id, a list, or nothing, nested in multimodal configs (F16)."""
    named = config.get("eos_token_id")
    ids = {
        token for token in (named if isinstance(named, list) else [named]) if isinstance(token, int)
    }
    nested = config.get("text_config")
    return frozenset(ids) | (eos_ids(nested) if isinstance(nested, Mapping) else frozenset())
