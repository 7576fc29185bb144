"""Bounds of the values of a request. Pure."""

# A schema checks HTTP requests only. An embedding program's wrong value would otherwise crash a
# task or engine that all requests share.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any, get_args

import attrs

from trouper.protocol.grammar import Grammar
from trouper.protocol.problems import bad_request
from trouper.protocol.requests import (
    BATCH_PRIORITY,
    MIN_PRIORITY,
    UNBOUNDED,
    CacheScope,
    Generate,
    InfillPrompt,
    Prompt,
    Speculation,
    Timeouts,
    TokenPrompt,
)
from trouper.protocol.sampling import Sampling, bounds_of_parameters

Show = Callable[[float], str]


# Bounds beyond are named only to a client that exceeds them.
UNREACHED = 2.0**53


def describe_range(
    value: float, low: float, high: float, *, lower: str = "at least", show: Show = str
) -> str:
    bounds = []
    if low > -UNREACHED or value < low:
        bounds.append(f"{lower} {show(low)}")
    if high < UNREACHED or value > high:
        bounds.append(f"at most {show(high)}")
    return " and ".join(bounds) or "a finite number"


@attrs.frozen
class Number:
    minimum: float
    maximum: float
    integer: bool = False
    optional: bool = False

    def fault(self, value: object) -> str | None:
        if value is None and self.optional:
            return None
        kinds = int if self.integer else (int, float)
        if not isinstance(value, kinds):
            kind = "an integer" if self.integer else "a number"
            return f"must be {kind}{' or None' * self.optional}, not {_shown(value)}"
        if not self.minimum <= value <= self.maximum:  # Neither is what is not a number.
            limits = describe_range(value, self.minimum, self.maximum)
            return f"must be {limits}, not {value}"
        return None


LENGTH = Number(0, UNBOUNDED, integer=True, optional=True)
# Number of most likely tokens that the engine finds at each position.
MAX_LOGPROBS = 64
LOGPROBS = Number(0, MAX_LOGPROBS, integer=True, optional=True)
SECONDS = Number(0, inf, optional=True)
OF_REQUEST: Mapping[str, Number] = {
    "max_tokens": Number(1, UNBOUNDED, integer=True, optional=True),
    "min_tokens": Number(0, UNBOUNDED, integer=True),
    "thinking_token_budget": LENGTH,
    "logprobs": LOGPROBS,
    "prompt_logprobs": LOGPROBS,
    "priority": Number(MIN_PRIORITY, BATCH_PRIORITY, integer=True),
}
OF_SAMPLING: Mapping[str, Number] = {
    name: Number(*bounds) for name, bounds in bounds_of_parameters()
}
BIAS = Number(-inf, inf)
TYPES: Mapping[str, tuple[type, ...]] = {
    "prompt": get_args(Prompt),
    "sampling": (Sampling,),
    "grammar": (Grammar, type(None)),
    "adapter": (str,),
    "cache_salt": (str,),
    "cache_scope": (CacheScope,),
    "tenant": (str,),
    "timeouts": (Timeouts, type(None)),
}
TUPLES: Mapping[str, type] = {
    "stop": str,
    "stop_token_ids": int,
    "logprob_tokens": int,
    "logits_processors": str,
}


def check_bounds(request: Generate) -> None:
    """Raises `RequestFailed` (400) that names the first invalid field."""
    _check_types(request)
    _check_token_ids(request.prompt)
    _check_numbers(request, OF_REQUEST)
    _check_numbers(request.sampling, OF_SAMPLING)
    for name, kind in TUPLES.items():
        _check_tuple(name, getattr(request, name), kind)
    _check_tuple("dry_sequence_breakers", request.sampling.dry_sequence_breakers, str)
    _check_biases(request.sampling.logit_bias)
    if "" in request.stop:
        raise bad_request("stop must not hold an empty string", "stop", "invalid_value")
    if request.speculation is not None and request.speculation not in get_args(Speculation):
        raise bad_request(
            f"speculation must be one of {', '.join(get_args(Speculation))}, or None",
            "speculation",
            "invalid_value",
        )
    if request.timeouts is not None:
        _check_numbers(request.timeouts, {field.name: SECONDS for field in attrs.fields(Timeouts)})


def _check_types(request: Generate) -> None:
    for name, kinds in TYPES.items():
        if not isinstance(value := getattr(request, name), kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise bad_request(f"{name} must be {names}, not {_shown(value)}", name, "invalid_type")


def _check_token_ids(prompt: Prompt) -> None:
    # Refuse floats, which the conversion to bytes would cut to other tokens.
    if isinstance(prompt, TokenPrompt):
        tokens: object = prompt.tokens
    elif isinstance(prompt, InfillPrompt) and isinstance(prompt.prefix, tuple | list):
        tokens = prompt.prefix
    else:
        return
    if not isinstance(tokens, tuple | list):
        raise bad_request(
            f"prompt must be a tuple of token ids, not {_shown(tokens)}", "prompt", "invalid_type"
        )
    # By kind, since a prompt may have a million tokens. NumPy's integers are no `int`.
    wrong = {kind for kind in set(map(type, tokens)) if not hasattr(kind, "__index__")}
    if wrong:
        first = next(token for token in tokens if type(token) in wrong)
        raise bad_request(
            f"prompt must be a tuple of token ids, not of {_shown(first)}", "prompt", "invalid_type"
        )


def _check_numbers(holder: object, bounds: Mapping[str, Number]) -> None:
    for name, number in bounds.items():
        if (fault := number.fault(getattr(holder, name))) is not None:
            raise bad_request(f"{name} {fault}", name, "invalid_value")


def _check_tuple(name: str, value: Iterable[object], kind: type) -> None:
    if not isinstance(value, tuple | list) or not all(isinstance(one, kind) for one in value):
        raise bad_request(
            f"{name} must be a tuple of {kind.__name__}, not {_shown(value)}", name, "invalid_type"
        )


def _check_biases(biases: Any) -> None:
    for pair in biases if isinstance(biases, tuple | list) else (None,):
        if (
            not isinstance(pair, tuple | list)
            or len(pair) != 2
            or not isinstance(pair[0], int)
            or BIAS.fault(pair[1])
        ):
            message = f"logit_bias must be a tuple of (token id, bias), not {_shown(biases)}"
            raise bad_request(message, "logit_bias", "invalid_type")


def _shown(value: object) -> str:
    # The type of a wrong value, and a short value itself.
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__
