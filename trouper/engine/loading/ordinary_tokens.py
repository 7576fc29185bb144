"""Tokens of a text in which no control token is looked for, as transformers gives with
`split_special_tokens`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property, partial
from typing import Any

import attrs
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from trouper.engine.loading.control_tokens import LONGEST, compiled
from trouper.engine.loading.tokenizer_files import inner_tokenizer

METASPACE = "▁"


# The library's own switch belongs to the whole tokenizer, which threads share, and leaves added
# tokens that are not special.
@attrs.frozen(eq=False, slots=False)
class OrdinaryEncoder:
    _wrapped: TokenizerWrapper
    _controls: AbstractSet[str]

    def encode(self, text: str, *, first: bool) -> list[int]:
        """`first`: the text begins the prompt."""
        ids: list[int] = []
        for index, part in enumerate(self._others.split(text)):
            if index % 2:
                ids.append(self._added[part])
            elif part:
                ids += self._tokens(part, first and not ids)
        return ids

    @cached_property
    def _added(self) -> dict[str, int]:
        return {str(token): id_ for id_, token in self._wrapped.added_tokens_decoder.items()}

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        """Without the token for unknown characters."""
        ids = {self._added[text] for text in self._controls}
        return frozenset(ids - {self._wrapped.unk_token_id})

    @cached_property
    def _others(self) -> re.Pattern[str]:
        """Added tokens that are ordinary text, such as runs of blanks."""
        texts = {text for text in self._added if text and len(text) <= LONGEST}
        return compiled(texts - self._controls, frame="({})")

    @cached_property
    def _backend(self) -> Any:
        inner = inner_tokenizer(self._wrapped)
        return inner.backend_tokenizer if isinstance(inner, PreTrainedTokenizerFast) else None

    def _tokens(self, text: str, first: bool) -> list[int]:
        if self._backend is None:
            encode = partial(
                self._wrapped.encode, add_special_tokens=False, split_special_tokens=True
            )
            return self._without_controls([text], encode)
        pieces = self._pieces(text)
        if not first and self._drops_prefix and not text.startswith((" ", METASPACE)):
            pieces[:1] = filter(None, [piece.removeprefix(METASPACE) for piece in pieces[:1]])
        return self._without_controls(pieces, self._of_model)

    def _of_model(self, piece: str) -> list[int]:
        return [token.id for token in self._backend.model.tokenize(piece)]

    def _pieces(self, text: str) -> list[str]:
        backend = self._backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        if backend.pre_tokenizer is None:
            return [text]
        return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]

    @cached_property
    def _drops_prefix(self) -> bool:
        """Whether only the first text of a prompt gets a leading blank, not one behind a token."""
        alone = [id_ for piece in self._pieces("a") for id_ in self._of_model(piece)]
        behind = self._backend.encode(f"{min(self._controls)}a", add_special_tokens=False).ids
        return bool(behind[-len(alone) :] != alone)

    def _without_controls(
        self, pieces: Sequence[str], encode: Callable[[str], list[int]]
    ) -> list[int]:
        # A vocabulary may hold a control token's text itself: its characters are encoded then.
        cache: dict[str, list[int]] = {}
        ids: list[int] = []
        for piece in pieces:
            tokens = cache.get(piece)
            if tokens is None:
                tokens = encode(piece)
                if not self._control_ids.isdisjoint(tokens):
                    tokens = [id_ for character in piece for id_ in encode(character)]
                cache[piece] = tokens
            ids += tokens
        return ids
