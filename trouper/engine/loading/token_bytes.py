"""The bytes that each token adds to the visible text, whatever kind the tokenizer is.

Decoding token by token is wrong (a character may span tokens) and decoding everything again at each
step is quadratic; a table of bytes is neither. The three kinds: byte-level BPE writes each byte as
a printable character (GPT-2's table, openai/gpt-2 encoder.py), SentencePiece writes a space as
U+2581 and rare bytes as <0xE2>, and for others (WordPiece) each token is decoded after a fixed
word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from mlx_lm.tokenizer_utils import TokenizerWrapper

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
ANCHOR = "a"
"""Word after which tokens are decoded."""


@attrs.frozen
class TokenTable:
    """Bytes and special tokens of a vocabulary."""

    pieces: tuple[bytes, ...]
    """Bytes by token id; b"" for special tokens and for ids that no token has."""
    specials: Mapping[int, str]


def token_table(tokenizer: TokenizerWrapper) -> TokenTable:
    """Build the table of a tokenizer of any kind."""
    vocab: dict[str, int] = tokenizer.get_vocab()
    added = tokenizer.added_tokens_decoder
    specials = {i: str(token) for i, token in added.items() if token.special}
    specials |= {i: str(tokenizer.convert_ids_to_tokens(i)) for i in tokenizer.all_special_ids}
    pieces = [b""] * (max([*vocab.values(), *added]) + 1)
    to_bytes = _decoder(tokenizer, vocab)
    for piece, i in vocab.items():
        pieces[i] = to_bytes(piece)
    for i, token in added.items():
        pieces[i] = str(token).encode()
    for i in specials:
        pieces[i] = b""
    return TokenTable(tuple(pieces), specials)


def _decoder(tokenizer: TokenizerWrapper, vocab: Mapping[str, int]) -> Callable[[str], bytes]:
    kinds = set(_kinds(tokenizer))
    if "ByteLevel" in kinds or (not kinds and any(piece.startswith("Ġ") for piece in vocab)):
        return byte_level
    if kinds & {"ByteFallback", "Metaspace"} or (
        not kinds and any(piece.startswith("▁") for piece in vocab)
    ):
        return sentencepiece
    return _as_followed(tokenizer)


def _kinds(tokenizer: TokenizerWrapper) -> Iterator[str]:
    """Yield the decoders of a tokenizer.json, also those in sequences; none for tokenizers in
    Python. Only the decoder is written as JSON: the vocabulary takes a tenth of a second for each
    50,000 tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    written = getattr(backend, "decoder", None)
    decoder: dict[str, Any] | None = (
        json.loads(written.__getstate__()) if written is not None else None
    )
    for part in [decoder or {}, *(decoder or {}).get("decoders", ())]:
        if "type" in part:
            yield part["type"]


def _byte_characters() -> dict[str, int]:
    """Build GPT-2's table: printable bytes map to themselves, the others to characters from
    U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + n): byte for n, byte in enumerate(unprintable)
    }


BYTE_OF = _byte_characters()


def byte_level(piece: str) -> bytes:
    """Decode a token of byte-level BPE."""
    try:
        return bytes([BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()  # a token that was added as plain text


def sentencepiece(piece: str) -> bytes:
    """Decode a token of SentencePiece."""
    if byte := BYTE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace("▁", " ").encode()


def _as_followed(tokenizer: TokenizerWrapper) -> Callable[[str], bytes]:
    """Make a function that decodes a token after a word: WordPiece joins `##ing` and separates
    others by a space."""
    anchor = tokenizer.encode(ANCHOR, add_special_tokens=False)
    before = tokenizer.decode(anchor)

    def followed(piece: str) -> bytes:
        after: str = tokenizer.decode([*anchor, tokenizer.convert_tokens_to_ids(piece)])
        return after.removeprefix(before).encode()

    return followed
