"""Bytes of visible text by token.

A character may span tokens, and decoding all text at each step is quadratic. Byte-level BPE has
GPT-2's table (openai/gpt-2 encoder.py), SentencePiece has U+2581 and <0xE2>, and other tokens are
decoded after a fixed word.
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


@attrs.frozen
class TokenTable:
    pieces: tuple[bytes, ...]
    """By token id; b"" for special tokens and unused ids."""
    specials: Mapping[int, str]


def token_table(tokenizer: TokenizerWrapper) -> TokenTable:
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
    # Only the decoder is serialized: 50,000 tokens of vocabulary take 0.1 s.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    written = getattr(backend, "decoder", None)
    decoder: dict[str, Any] | None = (
        json.loads(written.__getstate__()) if written is not None else None
    )
    for part in [decoder or {}, *(decoder or {}).get("decoders", ())]:
        if "type" in part:
            yield part["type"]


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: printable bytes map to themselves, others to characters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + n): byte for n, byte in enumerate(unprintable)
    }


BYTE_OF = _byte_characters()


def byte_level(piece: str) -> bytes:
    try:
        return bytes([BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()  # a token that was added as plain text


def sentencepiece(piece: str) -> bytes:
    if byte := BYTE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace("▁", " ").encode()


def _as_followed(tokenizer: TokenizerWrapper) -> Callable[[str], bytes]:
    # WordPiece joins `##ing` and separates others by a space.
    anchor = tokenizer.encode(ANCHOR, add_special_tokens=False)
    before = tokenizer.decode(anchor)

    def followed(piece: str) -> bytes:
        after: str = tokenizer.decode([*anchor, tokenizer.convert_tokens_to_ids(piece)])
        return after.removeprefix(before).encode()

    return followed
