"""Tokenizing at a bounded cost: a prompt that cannot fit is refused before. Pure, for any
thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from trouper.actors.runtime.worker_threads import Lane
from trouper.protocol.model import InfillTokens, ModelCard, Tokenizer
from trouper.protocol.problems import ContextExcess, RequestFailed, bad_request, context_full
from trouper.protocol.requests import (
    ChatPrompt,
    InfillPrompt,
    PairPrompt,
    PairTokens,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from trouper.protocol.settings import Settings

REPOSITORY = "myproject\n"
FILE = "filename\n"
SNIPPET = "\n\n--- snippet ---\n\n"
"""Header of a file without a token for that, as in llama.cpp."""


def infill_of(prompt: InfillPrompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokenize leading tokens, other files, then prefix and suffix in the order of the family.
    Raises `RequestFailed` (400) if the vocabulary lacks the tokens."""
    marks = tokenizer.infill
    if marks is None:
        message = (
            "this model's vocabulary has no tokens to fill in the middle: serve a model that was "
            "trained for it, such as Qwen2.5-Coder, or leave suffix out"
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
    anchor = tokenizer.encode("\n", special=False)
    anchored = tokenizer.encode("\n" + text, special=False)
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


LONG_TEXT = 20_000
"""Characters and other parts beyond which tokenizing leaves the event loop: about 5 ms."""
LONG_LANE = 200_000
LONG_IMAGES = 2**20
"""Bytes of images beyond which their hashing leaves the event loop: 1 to 3 ms."""
MIN_CHARACTERS = 16
"""Lower bound of a token's maximum characters, whatever the vocabulary says."""
TOKEN_CHARACTERS = 16
USUAL_CHARACTERS = 4
"""Characters of a token in English."""
LIMITS = "see --max-prompt-tokens, --max-kv-size"
PROBED_CHARACTERS = 8
"""Characters per available token in the probe, the tokenized beginning of a long text."""
# The cut of a text may add a few tokens.
PROBE_MARGIN = 1.02
Check = Callable[[str, Tokenizer, int, str], None]


def max_prompt_tokens_of(card: ModelCard, settings: Settings) -> int:
    bounds = (card.context_length, settings.max_kv_size, settings.max_prompt_tokens)
    return min(bound for bound in bounds if bound is not None)


def max_characters(tokens: int, tokenizer: Tokenizer) -> int:
    """Upper bound of the characters of so many tokens: twice the longest token."""
    # Some tokenizers drop the blanks between words.
    return tokens * max(2 * tokenizer.longest_token, MIN_CHARACTERS)


def is_short(prompt: Prompt, limit: int = LONG_TEXT) -> bool:
    """Whether a prompt has at most `limit` characters; stops counting early. A chat of `LONG_TEXT`
    parts or `LONG_IMAGES` bytes of images is long."""
    match prompt:
        case TokenPrompt():
            return True
        case TextPrompt() | PairPrompt() | InfillPrompt():
            return characters_of(prompt) <= limit
        case ChatPrompt(messages=messages, template_kwargs=kwargs, images=images):
            if sum(len(image.data) for image in images) > LONG_IMAGES:
                return False
            size, parts = 0, 0
            for value in islice(_leaves((messages, kwargs)), LONG_TEXT):
                parts += 1
                size += len(value) if isinstance(value, str) else 1
                if size > limit:
                    return False
            return parts < LONG_TEXT


def lane_of_text(prompt: Prompt) -> Lane:
    return "quick" if is_short(prompt, LONG_LANE) else "slow"


def characters_of(prompt: Prompt) -> int:
    """Characters of a plain prompt; an upper bound for one of tokens."""
    match prompt:
        case TextPrompt(text=text):
            return len(text)
        case PairPrompt(query=query, document=document):
            return len(query) + len(document)
        case InfillPrompt():
            return len(infill_text(prompt))
        case TokenPrompt(tokens=tokens):
            return TOKEN_CHARACTERS * len(tokens)
        case ChatPrompt():
            return sum(len(leaf) for leaf in _leaves(prompt.messages) if isinstance(leaf, str))


def tokens_of(
    prompt: Prompt, tokenizer: Tokenizer, max_tokens: int, check: Check | None = None
) -> tuple[int, ...]:
    """Tokenize a prompt. Raises `RequestFailed` (400), also for certainly more than `max_tokens`
    tokens; the caller checks the exact count. `check`: of the length of a text; default
    `check_length`."""
    check = check or check_length
    match prompt:
        case TokenPrompt(tokens=tokens):
            return tokens
        case TextPrompt(text=text):
            check_text(text, "prompt")
            check(text, tokenizer, max_tokens, "prompt")
            return tokenizer.encode(text, special=prompt.special)
        case PairPrompt():
            return pair_tokens_of(prompt, tokenizer, max_tokens)[0]
        case InfillPrompt():
            check_text((prompt.prefix, prompt.suffix, prompt.extra), "suffix")
            check(infill_text(prompt), tokenizer, max_tokens, "prompt")
            return infill_of(prompt, tokenizer)
        case ChatPrompt(messages=messages, template_kwargs=kwargs):
            if not tokenizer.has_chat_template:
                raise bad_request(
                    "this model has no chat template; use /v1/completions",
                    "messages",
                    "no_chat_template",
                )
            check_text((messages, kwargs), "messages")
            rendered = tokenizer.render_chat(messages, kwargs)
            if rendered is None:
                return tokenizer.encode_chat(messages, **kwargs)
            check(rendered, tokenizer, max_tokens, "messages")
            return tokenizer.encode(rendered, special=False)


def pair_tokens_of(
    prompt: PairPrompt, tokenizer: Tokenizer, max_tokens: int
) -> tuple[tuple[int, ...], int]:
    """As `tokens_of`, with the index of `Tokenizer.encode_pair`."""
    check_text((prompt.query, prompt.document), "prompt")
    for text in (prompt.query, prompt.document):
        check_length(text, tokenizer, max_tokens, "prompt")
    return tokenizer.encode_pair(prompt.query, prompt.document)


def tokenize_together(
    prompts: Sequence[TextPrompt | PairPrompt], tokenizer: Tokenizer, max_tokens: int
) -> list[PairTokens]:
    """Tokenize prompts in one batch; none if one of them is to be refused, which it is alone."""
    texts = [
        prompt.text if isinstance(prompt, TextPrompt) else (prompt.query, prompt.document)
        for prompt in prompts
    ]
    try:
        for text in _leaves(texts):
            check_text(text, "prompt")
            check_length(str(text), tokenizer, max_tokens, "prompt")
        return tokenizer.encode_batch(texts)
    except Exception:  # noqa: BLE001 - as `RequestIntake` catches them, of one request.
        return []


def check_length(text: str, tokenizer: Tokenizer, max_tokens: int, param: str) -> None:
    """Raises `RequestFailed` (400) for certainly more than `max_tokens` tokens, after tokenizing
    the beginning at most."""
    check_characters(text, tokenizer, max_tokens, param)
    probed = max_tokens * PROBED_CHARACTERS
    if len(text) > max(2 * probed, LONG_TEXT):
        found = len(tokenizer.encode(text[:probed]))
        if found > max_tokens * PROBE_MARGIN + 8:
            raise _too_long(
                found * len(text) // probed,
                f"estimated by the first {probed} of {len(text)} characters",
                max_tokens,
                param,
            )


def infill_text(prompt: InfillPrompt) -> str:
    prefix = "" if isinstance(prompt.prefix, tuple) else prompt.prefix
    return "".join((prefix, prompt.suffix, *(part for file in prompt.extra for part in file)))


def check_characters(text: str, tokenizer: Tokenizer, max_tokens: int, param: str) -> None:
    """Raises `RequestFailed` (400) for more characters than `max_tokens` tokens can cover."""
    bound = max_characters(max_tokens, tokenizer)
    if len(text) > bound:
        raise _too_long(
            len(text) // USUAL_CHARACTERS,
            f"estimated by its {len(text)} characters, of which {bound} are the maximum",
            max_tokens,
            param,
        )


def _too_long(tokens: int, note: str, max_tokens: int, param: str) -> RequestFailed:
    excess = ContextExcess(tokens, 0, max_tokens)
    return context_full(excess, param, flags=LIMITS, note=note)


def check_text(value: object, param: str) -> None:
    r"""Raises `RequestFailed` (400) for a lone surrogate."""
    # JSON's "\ud800" crashes tokenizers: a user's mistake, not a bug.
    for leaf in _leaves(value):
        if isinstance(leaf, str) and not leaf.isascii():
            try:
                leaf.encode()
            except UnicodeEncodeError:
                raise bad_request(
                    "half of a surrogate pair is no text", param, "invalid_text"
                ) from None


def _leaves(value: object) -> Iterator[object]:
    inside: list[object] = [value]
    while inside:
        value = inside.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):  # Before Mapping, which is slow to ask for.
            yield from value
            inside += value.values()
        elif isinstance(value, list | tuple):
            inside += value
        elif isinstance(value, Mapping):
            inside += (*value.keys(), *value.values())
        else:
            yield value
