"""POST /v1/completions: the request."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import attrs

from trouper.protocol.errors import bad_request
from trouper.protocol.requests import Generate, Prompt, TextPrompt, TokenPrompt
from trouper.web.openai.parameters import (
    MAX_CHOICES,
    NOT_SUPPORTED,
    Parameters,
    choices_of,
    least_of,
    length_of,
    salt_of,
    sampling_of,
    stop_tokens_of,
    stops_of,
)  # fmt: skip
from trouper.web.openai.structured import grammar_of
from trouper.web.parsing import between, structure
from trouper.web.shape import Choice

MAX_PROMPTS = 128
MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16
"""OpenAI's own default for this endpoint."""

REFUSED: dict[str, tuple[Any, ...]] = NOT_SUPPORTED | {
    "suffix": ("",),
}


@attrs.frozen(kw_only=True)
class CompletionRequest(Parameters):
    prompt: Any
    logprobs: int | None = None
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    best_of: int | None = None
    echo: bool = False

    @property
    def candidates(self) -> int:
        """Answers to make for each prompt; the best `n` of them are given."""
        return self.n if self.best_of is None else self.best_of


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    return structure(body, CompletionRequest, REFUSED)


def completion_to_generate(
    request: CompletionRequest, request_id: str, default_seed: int | None
) -> tuple[Generate, ...]:
    """One for each candidate of each prompt, each prompt with a seed of its own unless one was given: the same prompt
    twice asks for two answers. Raises `RequestFailed` (400) naming the parameter."""
    if request.logprobs is not None:
        between("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    prompts = prompts_of(request.prompt)
    _check_candidates(request, len(prompts))
    generates = (
        Generate(
            request_id=request_id if len(prompts) == 1 else f"{request_id}-{place}",
            prompt=prompt,
            sampling=sampling_of(request, default_seed),
            # With max_tokens 0 only the prompt is wanted; one token is made behind it, and not shown.
            max_tokens=1 if request.max_tokens == 0 and request.echo else length_of(request.max_tokens, "max_tokens"),
            stop=stops_of(request.stop),
            stop_token_ids=stop_tokens_of(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            # The best are those of the highest mean log-probability.
            logprobs=0 if request.logprobs is None and request.candidates > request.n else request.logprobs,
            prompt_logprobs=request.logprobs if request.echo else None,
            cache_salt=salt_of(request),
            min_tokens=least_of(request, request.max_tokens),
            grammar=grammar_of(request),
        )
        for place, prompt in enumerate(prompts)
    )
    return tuple(choice for generate in generates for choice in choices_of(generate, request.candidates))


def _check_candidates(request: CompletionRequest, prompts: int) -> None:
    between("n", request.n, 1, MAX_CHOICES)
    if request.best_of is not None:
        between("best_of", request.best_of, request.n, MAX_CHOICES)
        if request.stream and request.best_of > request.n:
            raise bad_request(
                "best_of cannot be streamed: which is best is known at the end", "best_of", "invalid_value"
            )
    if prompts * request.candidates > MAX_CHOICES:
        said = f"{prompts} prompts of {request.candidates} answers each are more than {MAX_CHOICES}"
        raise bad_request(said, "n" if request.best_of is None else "best_of", "invalid_value")


def picked(request: CompletionRequest, choices: Sequence[Choice]) -> Sequence[Choice]:
    """Of each prompt's candidates the `n` most likely per token, in the order of their making."""
    if request.candidates == request.n:
        return choices
    chosen: list[Choice] = []
    for start in range(0, len(choices), request.candidates):
        own = choices[start : start + request.candidates]
        ranked = sorted(range(len(own)), key=lambda place: _mean_logprob(own[place]), reverse=True)
        chosen += [own[place] for place in sorted(ranked[: request.n])]
    return chosen if request.logprobs is not None else [attrs.evolve(choice, logprobs=()) for choice in chosen]


def _mean_logprob(choice: Choice) -> float:
    seen = choice.logprobs
    return sum(at.logprob for at in seen) / len(seen) if seen else -inf


def prompts_of(value: Any) -> tuple[Prompt, ...]:
    """A string, strings, token ids, or arrays of token ids."""
    if isinstance(value, str):
        return (_text(value),)
    if not isinstance(value, list) or not value:
        raise bad_request(
            "prompt must be a string, an array of strings or token ids; not empty", "prompt", "invalid_type"
        )
    if all(type(item) is int for item in value):
        return (_tokens(value),)
    if len(value) > MAX_PROMPTS:
        raise bad_request(f"prompt may hold {MAX_PROMPTS} prompts, not {len(value)}", "prompt", "invalid_value")
    return tuple(_one(item, place) for place, item in enumerate(value))


def _one(item: Any, place: int) -> Prompt:
    if isinstance(item, str):
        return _text(item)
    if isinstance(item, list) and all(type(token) is int for token in item):
        return _tokens(item)
    raise bad_request(f"prompt.{place} must be a string or an array of token ids", f"prompt.{place}", "invalid_type")


def _text(text: str) -> TextPrompt:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_request("prompt holds a lone surrogate", "prompt", "invalid_value") from None
    return TextPrompt(text)


def _tokens(tokens: list[int]) -> TokenPrompt:
    if any(not 0 <= token < 2**31 for token in tokens):
        raise bad_request("token ids must be between 0 and 2^31 - 1", "prompt", "invalid_token")
    return TokenPrompt(tuple(tokens))
