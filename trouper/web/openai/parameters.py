"""Request parameters that the endpoints share, with llama.cpp's samplers, seeds and arguments of
the chat template."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import attrs
from msgspec import Meta

from trouper.protocol.problems import bad_request
from trouper.protocol.requests import Generate, Prompt, Speculation
from trouper.protocol.sampling import SEQUENCE_BREAKERS, Sampling, SamplingDefaults
from trouper.web.http.body_faults import says
from trouper.web.http.body_parsing import combination
from trouper.web.http.field_types import (
    HUGE,
    Count,
    Length,
    Model,
    Priority,
    Salt,
    Share,
    StopString,
)
from trouper.web.http.request_body import Body
from trouper.web.http.request_schema import HARMLESS, TOKEN_KEY, Unsupported, described
from trouper.web.openai.other_servers import NOT_SKIPPED
from trouper.web.openai.response_format import (
    Choices,
    Lark,
    Regex,
    ResponseFormat,
    Schema,
    StructuredOutputs,
)

MAX_BREAKERS = 16
Breaker = Annotated[str, Meta(min_length=1, max_length=40)]
"""Maximum length of llama.cpp."""


class FurtherSampling(Body, kw_only=True, frozen=True):
    top_n_sigma: Annotated[float, Meta(ge=-1, le=100)] = 0.0
    typical_p: Share = 1.0
    xtc_probability: Share = 0.0
    xtc_threshold: Share = 0.1
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] = 0.0
    dry_base: Annotated[float, Meta(ge=1, le=100)] = 1.75
    dry_allowed_length: Annotated[int, Meta(ge=1, le=2**20)] = 2
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=HUGE)] = -1
    dry_sequence_breakers: Annotated[tuple[Breaker, ...], Meta(max_length=MAX_BREAKERS)] | None = (
        None
    )


def with_further(sampling: Sampling, request: FurtherSampling) -> Sampling:
    values = {name: getattr(request, name) for name in FurtherSampling.__struct_fields__}
    values["top_n_sigma"] = max(request.top_n_sigma, 0.0)  # llama.cpp's default is -1.
    values["dry_penalty_last_n"] = min(request.dry_penalty_last_n, 2**30)
    values["dry_sequence_breakers"] = _breakers(request.dry_sequence_breakers)
    return attrs.evolve(sampling, **values)


def _breakers(given: Sequence[str] | None) -> tuple[str, ...]:
    return SEQUENCE_BREAKERS if given is None else tuple(dict.fromkeys(given))


MAX_STOPS = 64
"""Editors send one for each keyword or character."""
MAX_BIASES = 1024
MAX_CHOICES = 128


def token_of(key: str, path: str) -> int:
    """Raises `RequestFailed` (400)."""
    if not (key.isascii() and key.isdigit() and len(key) < 10 and str(int(key)) == key):
        raise bad_request(f"logit_bias keys are token ids, not {key!r}", path, "invalid_value")
    return int(key)


StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
TokenKey = Annotated[str, described(TOKEN_KEY)]
Biases = Annotated[
    dict[TokenKey, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)
]
StopToken = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class StreamOptions(Body, kw_only=True, frozen=True):
    unsupported: ClassVar[Unsupported] = {"include_obfuscation": (False,)}
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingParameters(FurtherSampling, kw_only=True, frozen=True):
    """The parameters of every endpoint that generates."""

    essential: ClassVar[frozenset[str]] = NOT_SKIPPED
    model: Model | None = None
    adapters: Model | None = None
    # None: as the model's generation_config.json says, else off (temperature 1).
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=HUGE)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-30, le=100)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Biases | None = None
    seed: int | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[tuple[StopToken, ...], Meta(max_length=1024)] = ()
    ignore_eos: bool = False
    min_tokens: Count = 0
    stream: bool = False
    user: Annotated[str, HARMLESS] | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    speculation: Speculation | None = None


class Parameters(SamplingParameters, kw_only=True, frozen=True):
    """The further parameters that chat and completions share."""

    max_tokens: Length | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Lark | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


def sampling_of(parameters: SamplingParameters, defaults: SamplingDefaults) -> Sampling:
    """Raises `RequestFailed` (400)."""
    sampling = Sampling(
        presence_penalty=parameters.presence_penalty,
        frequency_penalty=parameters.frequency_penalty,
        logit_bias=biases(parameters.logit_bias),
        seed=drawn_seed(parameters.seed, defaults.seed),
    )
    sampling = defaults.fill(
        sampling,
        temperature=parameters.temperature,
        top_p=parameters.top_p,
        top_k=bounded_top_k(parameters.top_k),
        min_p=parameters.min_p,
        repetition_penalty=parameters.repetition_penalty,
    )
    return with_further(sampling, parameters)


def bounded_top_k(requested: int | None) -> int | None:
    """0 is off, as -1 in vLLM."""
    return None if requested is None else min(max(requested, 0), 2**30)


def generate_of(
    parameters: SamplingParameters,
    request_id: str,
    prompt: Prompt,
    defaults: SamplingDefaults,
    max_tokens: int | None,
) -> Generate:
    """Build a request from the shared parameters. With `max_tokens` 0 one token is generated and
    not shown. Raises `RequestFailed` (400)."""
    return Generate(
        request_id=request_id,
        prompt=prompt,
        sampling=sampling_of(parameters, defaults),
        max_tokens=1 if max_tokens == 0 else max_tokens,
        stop=stops_of(parameters.stop),
        stop_token_ids=parameters.stop_token_ids,
        ignore_eos=parameters.ignore_eos,
        cache_salt=parameters.cache_salt or "",
        speculation=parameters.speculation,
        min_tokens=_min_tokens(parameters, max_tokens),
    )


def biases(value: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    return tuple((token_of(key, f"logit_bias.{key}"), bias) for key, bias in (value or {}).items())


def stops_of(value: str | list[str] | None) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    return tuple(dict.fromkeys(stops or ()))


def _min_tokens(parameters: SamplingParameters, max_tokens: int | None) -> int:
    if max_tokens is not None and parameters.min_tokens > max_tokens:
        raise combination(
            f"min_tokens must be at most {max_tokens}, the most there may be", "min_tokens"
        )
    return parameters.min_tokens


def stream_options(parameters: Parameters) -> StreamOptions:
    """Raises `RequestFailed` (400) without a stream."""
    if parameters.stream_options is None:
        return StreamOptions()
    if not parameters.stream:
        raise combination("stream_options needs stream: true", "stream_options")
    return parameters.stream_options


UNSUPPORTED_SAMPLING: Unsupported = {
    "store": (False, True),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
}
"""Unsupported parameters, and the values that request nothing. SGLang's router always sends the
last two."""


SEED_STRIDE = 0x9E3779B97F4A7C15
"""Difference of two choices' seeds: odd, for many different seeds; 2^64 over the golden ratio."""


def drawn_seed(requested: int | None, default: int | None) -> int:
    if requested is not None:
        return requested
    return default if default is not None else secrets.randbits(63)


def choices_of(generate: Generate, count: int) -> tuple[Generate, ...]:
    """Repeat the request with the seed and derived seeds. The common prompt is prefilled once."""
    if count == 1 and 0 <= generate.sampling.seed < 2**64:
        return (generate,)
    return tuple(
        attrs.evolve(
            generate,
            request_id=f"{generate.request_id}-{index}" if index else generate.request_id,
            sampling=attrs.evolve(
                generate.sampling, seed=(generate.sampling.seed + index * SEED_STRIDE) % 2**64
            ),
        )
        for index in range(count)
    )


NOT_FOR_TEMPLATES = frozenset(
    {
        "self",
        "messages",
        "conversation",
        "chat_template",
        "tokenize",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
    }
)
"""Arguments of the tokenizer's call, not of templates: padding to 10^9 tokens would exhaust
memory."""
ARRAYS = ("tools", "documents")
TEMPLATE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NAMES = {"pattern": f"^{TEMPLATE_KEY.pattern}$", "not": {"enum": sorted(NOT_FOR_TEMPLATES)}}
OBJECTS = {"type": ["array", "null"], "items": {"type": "object"}}
TemplateKwargs = Annotated[
    dict[str, Any],
    says(
        "{path} must be an object, not {type}",
        "invalid_type",
        extra_json_schema={"propertyNames": NAMES, "properties": dict.fromkeys(ARRAYS, OBJECTS)},
    ),
]


def template_kwargs(value: TemplateKwargs | None) -> dict[str, Any]:
    """Raises `RequestFailed` (400), also for malformed tools or documents."""
    name = "chat_template_kwargs"
    for key, given in (value or {}).items():
        if not TEMPLATE_KEY.fullmatch(key) or key in NOT_FOR_TEMPLATES:
            raise bad_request(f"{name}.{key} cannot be set", f"{name}.{key}", "invalid_value")
        if key in ARRAYS and given is not None and not _are_objects(given):
            raise bad_request(
                f"{name}.{key} must be an array of objects", f"{name}.{key}", "invalid_type"
            )
    return value or {}


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
