"""The request parameters that the endpoints share, and their conversion to sampling settings."""

from __future__ import annotations

import secrets
from typing import Any, get_args

import attrs

from trouper.protocol.problems import bad_request
from trouper.protocol.requests import Generate, Speculation
from trouper.protocol.sampling import Sampling
from trouper.web.http.body_parsing import between, combination, json_type, structure
from trouper.web.http.request_schema import HARMLESS, LENGTH, Refused, limits, schema, schema_of
from trouper.web.openai import schemas

SPECULATIONS: tuple[Speculation, ...] = get_args(Speculation)
MAX_STOPS = 16
MAX_BIASES = 1024
MAX_CHOICES = 128
SEED_STRIDE = 0x9E3779B97F4A7C15
"""Difference of the seeds of two choices. Odd, so that the seeds of many choices differ: 2^64 over the golden ratio."""
HUGE = 2**63


@attrs.frozen(kw_only=True)
class StreamOptions:
    include_usage: bool = False
    continuous_usage_stats: bool = False


STREAM_OPTIONS_REFUSED: Refused = {
    "include_obfuscation": (False,),
}


@attrs.frozen(kw_only=True)
class SamplingParameters:
    """The parameters of every endpoint. `Any` fields have several JSON types and are checked by hand."""

    model: str | None = None
    temperature: float = attrs.field(default=1.0, metadata=limits(0, 2))
    top_p: float = attrs.field(default=1.0, metadata=limits(above=0, high=1))
    top_k: int = attrs.field(default=0, metadata=limits(-1, HUGE))
    min_p: float = attrs.field(default=0.0, metadata=limits(0, 1))
    repetition_penalty: float = attrs.field(default=1.0, metadata=limits(above=0, high=100))
    presence_penalty: float = attrs.field(default=0.0, metadata=limits(-2, 2))
    frequency_penalty: float = attrs.field(default=0.0, metadata=limits(-2, 2))
    logit_bias: Any = attrs.field(default=None, metadata=schema(schemas.LOGIT_BIAS))
    seed: int | None = None
    stop: Any = attrs.field(default=None, metadata=schema(schemas.STOP))
    stop_token_ids: tuple[int, ...] = attrs.field(
        default=(), metadata=limits(maxItems=1024, items={"type": "integer", "minimum": 0, "maximum": 2**31 - 1})
    )
    ignore_eos: bool = False
    min_tokens: int = attrs.field(default=0, metadata=limits(0, HUGE))
    stream: bool = False
    stream_options: Any = attrs.field(default=None, metadata=schema(schema_of(StreamOptions, STREAM_OPTIONS_REFUSED)))
    user: str | None = attrs.field(default=None, metadata=HARMLESS)
    cache_salt: str | None = attrs.field(default=None, metadata=limits(maxLength=1024))
    speculation: str | None = attrs.field(default=None, metadata=schema({"enum": [*SPECULATIONS]}))


@attrs.frozen(kw_only=True)
class Parameters(SamplingParameters):
    """The further parameters that chat and completions share."""

    max_tokens: int | None = attrs.field(default=None, metadata=schema(LENGTH))
    response_format: Any = attrs.field(default=None, metadata=schema(schemas.RESPONSE_FORMAT))
    structured_outputs: Any = attrs.field(default=None, metadata=schema(schemas.STRUCTURED_OUTPUTS))
    guided_json: Any = attrs.field(default=None, metadata=schema(schemas.SCHEMA))
    guided_regex: Any = attrs.field(default=None, metadata=schema(schemas.REGEX))
    guided_choice: Any = attrs.field(default=None, metadata=schema(schemas.OPTIONS))
    guided_grammar: Any = attrs.field(default=None, metadata=schema(schemas.LARK))
    n: int = attrs.field(default=1, metadata=limits(1, MAX_CHOICES))
    return_token_ids: bool = False


def salt_of(parameters: SamplingParameters) -> str:
    """Salt of the prefix cache. Requests with another salt share no cached prompt, so a client cannot find out by
    timing what others sent."""
    return parameters.cache_salt or ""


def speculation_of(parameters: SamplingParameters) -> Speculation | None:
    """Return the speculation mode; the tokens are the same with any of them. Raises `RequestFailed` (400)."""
    asked = parameters.speculation
    for known in SPECULATIONS:
        if asked == known:
            return known
    if asked is None:
        return None
    choices = " or ".join(SPECULATIONS)
    raise bad_request(f"speculation must be {choices}, not {asked!r}", "speculation", "invalid_value")


def sampling_of(parameters: SamplingParameters, default_seed: int | None) -> Sampling:
    """Convert the sampling parameters. Raises `RequestFailed` (400) naming the parameter."""
    return Sampling(
        temperature=parameters.temperature,
        top_p=parameters.top_p,
        top_k=min(max(parameters.top_k, 0), 2**30),
        min_p=parameters.min_p,
        repetition_penalty=parameters.repetition_penalty,
        presence_penalty=parameters.presence_penalty,
        frequency_penalty=parameters.frequency_penalty,
        logit_bias=biases(parameters.logit_bias),
        seed=drawn_seed(parameters.seed, default_seed),
    )


def choices_of(generate: Generate, count: int) -> tuple[Generate, ...]:
    """Repeat the request. The first keeps its seed, the others have seeds derived from it. The common prompt is
    prefilled once: later ones wait for it."""
    return tuple(
        attrs.evolve(
            generate,
            request_id=f"{generate.request_id}-{index}" if index else generate.request_id,
            sampling=attrs.evolve(generate.sampling, seed=(generate.sampling.seed + index * SEED_STRIDE) % 2**64),
        )
        for index in range(count)
    )


def drawn_seed(asked: int | None, default: int | None) -> int:
    """Return the seed. Randomness enters here, as data: the engine only hashes it."""
    if asked is not None:
        return asked
    return default if default is not None else secrets.randbits(63)


def biases(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise bad_request(f"logit_bias must be an object, not {json_type(value)}", "logit_bias", "invalid_type")
    if len(value) > MAX_BIASES:
        raise bad_request(f"logit_bias may have {MAX_BIASES} entries, not {len(value)}", "logit_bias", "invalid_value")
    return tuple(_bias(token, bias) for token, bias in value.items())


def _bias(token: str, bias: Any) -> tuple[int, float]:
    name = f"logit_bias.{token}"
    if not (token.isascii() and token.isdigit() and len(token) < 10 and str(int(token)) == token):
        raise bad_request(f"logit_bias keys are token ids, not {token!r}", name, "invalid_value")
    if type(bias) not in (int, float):
        raise bad_request(f"{name} must be a number, not {json_type(bias)}", name, "invalid_type")
    between(name, bias, -100, 100)
    return int(token), float(bias)


def stops_of(value: Any) -> tuple[str, ...]:
    """Return the stop strings: one, or up to 16 of them, none empty."""
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise bad_request("stop must be a string or an array of strings", "stop", "invalid_type")
    if len(stops) > MAX_STOPS:
        raise bad_request(f"stop may have {MAX_STOPS} strings, not {len(stops)}", "stop", "invalid_value")
    if "" in stops:
        raise bad_request("a stop string may not be empty", "stop", "invalid_value")
    return tuple(dict.fromkeys(stops))


def length_of(value: int | None, name: str) -> int | None:
    if value is not None:
        between(name, value, 1, HUGE)
    return value


def min_tokens_of(parameters: SamplingParameters, max_tokens: int | None) -> int:
    if max_tokens is not None and parameters.min_tokens > max_tokens:
        raise combination(f"min_tokens must be at most {max_tokens}, the most there may be", "min_tokens")
    return parameters.min_tokens


def stream_options(parameters: Parameters) -> StreamOptions:
    """Parse the stream options. Raises `RequestFailed` (400) naming the parameter."""
    name, options = "stream_options", parameters.stream_options
    if options is None:
        return StreamOptions()
    if not isinstance(options, dict):
        raise bad_request(f"{name} must be an object, not {json_type(options)}", name, "invalid_type")
    if not parameters.stream:
        raise combination(f"{name} needs stream: true", name)
    return structure(options, StreamOptions, STREAM_OPTIONS_REFUSED, within=f"{name}.")


NOT_SUPPORTED: Refused = {
    "store": (False, True),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "priority": (0,),
    "truncate_prompt_tokens": (),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
}
"""Parameters that clients send to either endpoint, and the values that request nothing. The last two are among those
that SGLang's router puts into every request."""
