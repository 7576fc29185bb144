"""Fill in the middle: the tokens of a prompt that has a prefix, a suffix and other files. Pure, for
any thread."""

from __future__ import annotations

from trouper.protocol.model import InfillTokens, Tokenizer
from trouper.protocol.problems import bad_request
from trouper.protocol.requests import InfillPrompt

REPOSITORY = "myproject\n"
"""Name of the repository, as llama.cpp has it."""
FILE = "filename\n"
"""Name of the file in which the answer stands, as llama.cpp has it."""
SNIPPET = "\n\n--- snippet ---\n\n"
"""What stands before a file if the vocabulary has no token for that, as llama.cpp has it."""


def infill_of(prompt: InfillPrompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokenize the prompt: first what the tokenizer puts before any text, then the other files,
    then prefix and suffix in the order of the model's family. Raises `RequestFailed` (400) if the
    vocabulary has no tokens for it."""
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
    """Tokens that the tokenizer puts before any text."""
    bare, encoded = tokenizer.encode("a", special=False), tokenizer.encode("a")
    start = next((at for at in range(len(encoded)) if encoded[at : at + len(bare)] == bare), 0)
    return encoded[:start]


def continued(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokenize a text that begins within a file. SentencePiece puts a space before it otherwise."""
    tokens = tokenizer.encode(text, special=False)
    if b"".join(map(tokenizer.token_bytes, tokens)) != b" " + text.encode():
        return tokens
    anchor, anchored = (
        tokenizer.encode("\n", special=False),
        tokenizer.encode("\n" + text, special=False),
    )
    return anchored[len(anchor) :] if anchored[: len(anchor)] == anchor else tokens


def _files(prompt: InfillPrompt, marks: InfillTokens, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokenize the other files."""
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
