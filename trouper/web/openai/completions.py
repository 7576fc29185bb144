"""POST /v1/completions: the request; and prompts: text, token ids, or arrays of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Annotated, Any, ClassVar

import attrs
from msgspec import Meta

from trouper.protocol.problems import bad_request
from trouper.protocol.requests import Generate, InfillPrompt, Prompt, TextPrompt, TokenPrompt
from trouper.protocol.sampling import SamplingDefaults
from trouper.web.http.body_parsing import (
    are_integers,
    at_most,
    between,
    checked_text,
    combination,
)
from trouper.web.http.field_types import HUGE, MAX_TOKENS, Count, TokenId
from trouper.web.http.leniency import Adapt, Skip
from trouper.web.http.request_schema import LENGTH, TEXT, TOKEN, Json, Unsupported, array, either
from trouper.web.openai import schemas
from trouper.web.openai.other_servers import (
    SAMPLING,
    STRUCTURES,
    format_adapted,
    length_aliases,
    sampling_adapted,
)
from trouper.web.openai.parameters import (
    MAX_CHOICES,
    UNSUPPORTED_SAMPLING,
    Parameters,
    choices_of,
    generate_of,
)
from trouper.web.openai.response_format import grammar_of
from trouper.web.output.dialect import Choice

Prompts = str | list[TokenId | str | list[TokenId]]
"""msgspec has no union of two array types; `prompts_of` refuses mixed ones."""


def prompts_meta(limit: int) -> Meta:
    ids = array(TOKEN, minItems=1, maxItems=MAX_TOKENS)
    schema = either(TEXT, ids, array(either(TEXT, ids), minItems=1, maxItems=limit))
    return Meta(
        extra={"schema": schema, "explains": lambda value, path: prompts_of(value, path, limit)}
    )


def prompts_of(value: Any, name: str, limit: int) -> tuple[Prompt, ...]:
    """Return at most `limit` prompts. Raises `RequestFailed` (400)."""
    if isinstance(value, str):
        return (TextPrompt(checked_text(value, name)),)
    if not isinstance(value, list) or not value:
        message = f"{name} must be a string, an array of strings or token ids; not empty"
        raise bad_request(message, name, "invalid_type")
    at_most(name, value, MAX_TOKENS)
    if are_integers(value):
        return (_tokens(value, name),)
    if len(value) > limit:
        raise bad_request(
            f"{name} may hold {limit} of them, not {len(value)}", name, "invalid_value"
        )
    return tuple(_prompt(item, f"{name}.{index}") for index, item in enumerate(value))


def _prompt(item: Any, path: str) -> Prompt:
    if isinstance(item, str):
        return TextPrompt(checked_text(item, path))
    if isinstance(item, list):
        at_most(path, item, MAX_TOKENS)
    if isinstance(item, list) and are_integers(item):
        return _tokens(item, path)
    raise bad_request(f"{path} must be a string or an array of token ids", path, "invalid_type")


def _tokens(tokens: list[float], path: str) -> TokenPrompt:
    if tokens and not 0 <= min(tokens) <= max(tokens) < 2**31:
        raise bad_request("token ids must be between 0 and 2^31 - 1", path, "invalid_token")
    return TokenPrompt(tuple(map(int, tokens)))


MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""
LENGTH_ALIASES = length_aliases("max_tokens", "max_output_tokens", "max_completion_tokens")
ALIASES = {**LENGTH_ALIASES, **SAMPLING, **STRUCTURES}


def _adapted(value: Json, skip: Skip) -> Json:
    value = sampling_adapted(value, ALIASES, ("max_tokens",), skip)
    return value | {"response_format": format_adapted(value.get("response_format"), flat=False)}


class CompletionRequest(Parameters, kw_only=True, frozen=True):
    unsupported: ClassVar[Unsupported] = UNSUPPORTED_SAMPLING
    aliases: ClassVar[Mapping[str, str]] = ALIASES
    adapt: ClassVar[Adapt | None] = _adapted
    rules: ClassVar[tuple[Json, ...]] = (
        schemas.OPTIONS_NEED_A_STREAM,
        *(schemas.nothing_needs_echo(name) for name in ("max_tokens", *LENGTH_ALIASES)),
        schemas.ONE_STRUCTURE,
    )
    prompt: Annotated[Prompts, prompts_meta(MAX_PROMPTS)]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_tokens: Annotated[Count, Meta(extra={"schema": either(LENGTH, {"const": 0})})] | None = (
        DEFAULT_MAX_TOKENS
    )
    best_of: Annotated[int, Meta(ge=0, le=MAX_CHOICES)] | None = None
    echo: bool = False
    suffix: str | None = None

    @property
    def candidates(self) -> int:
        return self.best_of or self.n  # OpenAI's range begins with 0.


def completion_to_generate(
    request: CompletionRequest, request_id: str, defaults: SamplingDefaults
) -> tuple[Generate, ...]:
    """Equal prompts without a given seed get different seeds. Raises `RequestFailed` (400)."""
    prompts = [
        _gap(prompt, request.suffix) for prompt in prompts_of(request.prompt, "prompt", MAX_PROMPTS)
    ]
    _check_candidates(request, len(prompts))
    if request.max_tokens is not None and not (request.max_tokens == 0 and request.echo):
        between("max_tokens", request.max_tokens, 1, HUGE)
    generates = (
        attrs.evolve(
            generate_of(request, request_id, prompt, defaults, request.max_tokens),
            request_id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
            # The best are those of the highest mean log-probability.
            logprobs=0
            if request.logprobs is None and request.candidates > request.n
            else request.logprobs,
            prompt_logprobs=request.logprobs if request.echo else None,
            grammar=grammar_of(request),
        )
        for index, prompt in enumerate(prompts)
    )
    return tuple(
        choice for generate in generates for choice in choices_of(generate, request.candidates)
    )


def _gap(prompt: Prompt, suffix: str | None) -> Prompt:
    if not suffix:
        return prompt
    assert isinstance(prompt, TextPrompt | TokenPrompt)
    return InfillPrompt(prompt.text if isinstance(prompt, TextPrompt) else prompt.tokens, suffix)


def _check_candidates(request: CompletionRequest, prompts: int) -> None:
    if request.candidates < request.n:
        raise combination(f"best_of must be at least n, which is {request.n}", "best_of")
    if request.stream and request.candidates > request.n:
        raise combination(
            "best_of cannot be streamed: which is best is known at the end", "best_of"
        )
    if prompts * request.candidates > MAX_CHOICES:
        message = (
            f"{prompts} prompts of {request.candidates} answers each are more than {MAX_CHOICES}"
        )
        raise combination(message, "best_of" if request.best_of else "n")


def picked(request: CompletionRequest, choices: Sequence[Choice]) -> Sequence[Choice]:
    """Return each prompt's `n` likeliest candidates per token, in order of generation."""
    if request.candidates == request.n:
        return choices
    chosen: list[Choice] = []
    for start in range(0, len(choices), request.candidates):
        candidates = choices[start : start + request.candidates]
        ranked = sorted(
            range(len(candidates)), key=lambda index: _mean_logprob(candidates[index]), reverse=True
        )
        chosen += [candidates[index] for index in sorted(ranked[: request.n])]
    return (
        chosen
        if request.logprobs is not None
        else [attrs.evolve(choice, logprobs=()) for choice in chosen]
    )


def _mean_logprob(choice: Choice) -> float:
    seen = choice.logprobs
    return sum(at.logprob for at in seen) / len(seen) if seen else -inf
