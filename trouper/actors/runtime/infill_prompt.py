"""Fill in the middle: tokens of a prompt with prefix, suffix and other files. Pure, for any
thread."""

from __future__ import annotations

from trouper.protocol.model import InfillTokens, Tokenizer
from trouper.protocol.problems import bad_request
from trouper.protocol.requests import InfillPrompt

REPOSITORY = "myproject\n"
FILE = "filename\n"
SNIPPET = "\n\n--- snippet ---\n\n"
"""Header of a file if the vocabulary has no token for that, as in llama.cpp."""


def infill_of(prompt: InfillPrompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokenize leading tokens, other files, then prefix and suffix in the order of the family.
    Raises `RequestFailed` (400) if the vocabulary lacks the tokens."""
    marks = tokenizer.infill
    if marks is None:
        message = (
            "this model's vocabulary has no tokens to fill in the middle: serve a model that was "
            "trained for it, "
            "such as Qwen2.5-Coder, or leave suffix out"
        )
        raise bad_request(message, "suffix", "infill_not_supported")
    prefix = (
        prompt.prefix
        if isinstance(prompt.prefix, tuple)
        else tokenizer.encode(prompt.prefix, special=False)
    )
    suffix = continued(prompt.suffix, tokenizer)
    if marks.middle is None:
        parts = (marks.suffix, *suffix, marks.prefix, *prefix)
    else:
        parts = (marks.prefix, *prefix, marks.suffix, *suffix, marks.middle)
    return (*leading(tokenizer), *_files(prompt, marks, tokenizer), *parts)


def leading(tokenizer: Tokenizer) -> tuple[int, ...]:
    bare, encoded = tokenizer.encode("a", special=False), tokenizer.encode("a")
    start = next((at for at in range(len(encoded)) if encoded[at : at + len(bare)] == bare), 0)
    return encoded[:start]


def continued(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokenize a text that begins within a file, without SentencePiece's leading space."""
    tokens = tokenizer.encode(text, special=False)
    if b"".join(map(tokenizer.token_bytes, tokens)) != b" " + text.encode():
        return tokens
    anchor, anchored = (
        tokenizer.encode("\n", special=False),
        tokenizer.encode("\n" + text, special=False),
    )
    return anchored[len(anchor) :] if anchored[: len(anchor)] == anchor else tokens


def _files(prompt: InfillPrompt, marks: InfillTokens, tokenizer: Tokenizer) -> tuple[int, ...]:
    found: list[int] = []
    if prompt.extra and marks.repository is not None:
        found += (marks.repository, *tokenizer.encode(REPOSITORY, special=False))
    for name, text in prompt.extra:
        if marks.file is not None:
            found += (marks.file, *tokenizer.encode(f"{name}\n", special=False))
        else:
            found += tokenizer.encode(SNIPPET, special=False)
        found += tokenizer.encode(text, special=False)
    if prompt.extra and marks.file is not None:
        found += (marks.file, *tokenizer.encode(FILE, special=False))
    return tuple(found)
