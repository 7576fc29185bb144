"""POST /v1/responses: the request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from trouper.actors.runtime.prompt_tokenizing import check_text
from trouper.protocol.grammar import Grammar
from trouper.protocol.problems import bad_request
from trouper.protocol.requests import ChatPrompt, Generate
from trouper.web.http.body_parsing import combination, json_type, structure
from trouper.web.http.request_schema import HARMLESS, LENGTH, Json, Refused, limits, schema, schema_of
from trouper.web.openai.chat_completions import TEMPLATE_KWARGS, template_kwargs
from trouper.web.openai.parameters import (
    HUGE,
    SamplingParameters,
    length_of,
    min_tokens_of,
    salt_of,
    sampling_of,
    speculation_of,
    stops_of,
)  # fmt: skip
from trouper.web.openai.response_format import text_format
from trouper.web.output.tool_calls import Tools
from trouper.web.responses import schemas
from trouper.web.responses.response_tools import tools_of

MAX_DEPTH = 256
"""Maximum nesting of values that are returned to the client or passed to a template."""
REFUSED: Refused = {
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "context_management": ([],),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "moderation": (),
    "access_programs": (),
    "image": (),
    "modalities": (["text"],),
    "priority": (0,),
}
REASONING_REFUSED: Refused = {
    "summary": ("auto",),
    "generate_summary": ("auto",),
    "context": ("auto",),
    "mode": ("standard",),
}
"""Unsupported options of `reasoning`. No second model would summarize it: reasoning is returned as it is."""
TEXT_REFUSED: Refused = {"verbosity": ("medium",)}
STREAM_OPTIONS_REFUSED: Refused = {"include_obfuscation": (False,)}
RULES = schemas.RULES


@attrs.frozen(kw_only=True)
class ReasoningOptions:
    effort: str | None = attrs.field(default=None, metadata=schema({"enum": list(schemas.EFFORTS)}))


@attrs.frozen(kw_only=True)
class TextOptions:
    format: Any = attrs.field(default=None, metadata=schema(schemas.FORMAT))


@attrs.frozen(kw_only=True)
class ResponseStreamOptions:
    """Stream options. None is read: all are refused or neutral."""


@attrs.frozen(kw_only=True)
class ResponseRequest(SamplingParameters):
    input: Any = attrs.field(default=None, metadata=schema(schemas.INPUT))
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = attrs.field(default=None, metadata=schema(LENGTH))
    top_logprobs: int | None = attrs.field(default=None, metadata=limits(0, 20))
    include: Any = attrs.field(default=None, metadata=schema(schemas.INCLUDE))
    tools: Any = attrs.field(default=None, metadata=schema(schemas.TOOLS))
    tool_choice: Any = attrs.field(default=None, metadata=schema(schemas.TOOL_CHOICE))
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = attrs.field(default=None, metadata=limits(1, HUGE) | {"harmless": True})
    """Applies to hosted tools, of which there are none."""
    text: Any = attrs.field(default=None, metadata=schema(schema_of(TextOptions, TEXT_REFUSED)))
    reasoning: Any = attrs.field(default=None, metadata=schema(schema_of(ReasoningOptions, REASONING_REFUSED)))
    thinking_token_budget: int | None = attrs.field(default=None, metadata=limits(0, HUGE))
    store: bool = True
    background: bool = False
    stream_options: Any = attrs.field(
        default=None, metadata=schema(schema_of(ResponseStreamOptions, STREAM_OPTIONS_REFUSED))
    )
    chat_template_kwargs: Any = attrs.field(default=None, metadata=schema(TEMPLATE_KWARGS))
    metadata: Any = attrs.field(default=None, metadata=schema(schemas.METADATA, harmless=True))
    """Returned to the client."""
    client_metadata: dict[str, Any] | None = attrs.field(default=None, metadata=HARMLESS)
    safety_identifier: str | None = attrs.field(default=None, metadata=HARMLESS)
    prompt_cache_key: str | None = attrs.field(default=None, metadata=HARMLESS)
    prompt_cache_retention: str | None = attrs.field(default=None, metadata=HARMLESS)


@attrs.frozen(kw_only=True)
class ResolvedRequest:
    """A request, and the parsed form of its parameters that have several JSON types."""

    request: ResponseRequest
    tools: Tools
    reasoning: ReasoningOptions
    format: Json
    """`text.format` as it was given."""
    grammar: Grammar | None
    logprobs: int | None
    metadata: Json


def parse_response(body: Json) -> ResponseRequest:
    """Parse a request. Raises `RequestFailed` (400) naming the parameter."""
    for name, value in body.items():
        check_text(value, name)  # Most fields are returned, and half a surrogate pair cannot be encoded.
        if name in ("tools", "tool_choice", "text", "chat_template_kwargs"):
            _check_depth(value, name)
    return structure(body, ResponseRequest, REFUSED)


def _check_depth(value: Any, name: str) -> None:
    """Check the nesting of a value: one that can just be parsed cannot be encoded again inside of another value."""
    inside = [value]
    for _ in range(MAX_DEPTH):
        inside = [inner for outer in inside for inner in _inside(outer)]
        if not inside:
            return
    raise bad_request(f"{name} is nested more than {MAX_DEPTH} times", name, "invalid_value")


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def asked_of(request: ResponseRequest) -> ResolvedRequest:
    """Resolve the parameters that have several JSON types. Raises `RequestFailed` (400) naming the parameter."""
    tools = tools_of(request.tools, request.tool_choice, several=request.parallel_tool_calls)
    text = _object(request.text, TextOptions, "text", TEXT_REFUSED)
    format = {"type": "text"} if text.format is None else text.format  # noqa: A001 - the field's word
    grammar = text_format(format, "text.format")
    if grammar is not None and tools.forced:
        raise combination("text.format cannot be combined with a forced tool", "tool_choice")
    if request.stream_options is not None:
        _object(request.stream_options, ResponseStreamOptions, "stream_options", STREAM_OPTIONS_REFUSED)
        if not request.stream:
            raise combination("stream_options needs stream: true", "stream_options")
    if request.background and not request.store:
        raise combination("background needs store: true", "background")
    return ResolvedRequest(
        request=request,
        tools=tools,
        reasoning=_object(request.reasoning, ReasoningOptions, "reasoning", REASONING_REFUSED),
        format=format,
        grammar=grammar,
        logprobs=_logprobs(request),
        metadata=_metadata(request.metadata),
    )


def _check_object(value: Any, name: str) -> None:
    if value is not None and not isinstance(value, dict):
        raise bad_request(f"{name} must be an object, not {json_type(value)}", name, "invalid_type")


def _object(value: Any, kind: type[Any], name: str, refused: Refused) -> Any:
    _check_object(value, name)
    return structure(value or {}, kind, refused, within=f"{name}.")


def _logprobs(request: ResponseRequest) -> int | None:
    include, top = request.include, request.top_logprobs
    if include is not None and not isinstance(include, list):
        raise bad_request(f"include must be an array, not {json_type(include)}", "include", "invalid_type")
    for index, name in enumerate(include or ()):
        if name not in schemas.INCLUDED:
            message = f"include.{index} must be one of {', '.join(schemas.INCLUDED)}, not {name!r}"
            raise bad_request(message, f"include.{index}", "invalid_value")
    if schemas.LOGPROBS in (include or ()):
        return top or 0
    if top:
        raise combination(f"top_logprobs needs {schemas.LOGPROBS!r} in include", "top_logprobs")
    return None


def _metadata(value: Any) -> Json:
    _check_object(value, "metadata")
    if len(value or ()) > schemas.MAX_METADATA:
        raise bad_request(
            f"metadata may have {schemas.MAX_METADATA} entries, not {len(value)}", "metadata", "invalid_value"
        )
    for key, item in (value or {}).items():
        if len(key) > schemas.MAX_METADATA_KEY or not isinstance(item, str) or len(item) > schemas.MAX_METADATA_VALUE:
            path = f"metadata.{key[: schemas.MAX_METADATA_KEY]}"
            limits = (
                f"a string of at most {schemas.MAX_METADATA_VALUE} characters, its name of {schemas.MAX_METADATA_KEY}"
            )
            raise bad_request(f"{path} must be {limits}", path, "invalid_value")
    return value or {}


# -- what it becomes -----------------------------------------------------------------------------------


def response_to_generate(
    asked: ResolvedRequest, messages: tuple[Json, ...], request_id: str, default_seed: int | None
) -> Generate:
    """Build the request for the runtime. Raises `RequestFailed` (400) naming the parameter."""
    request = asked.request
    return Generate(
        request_id=request_id,
        prompt=ChatPrompt(messages, _variables(asked)),
        sampling=sampling_of(request, default_seed),
        max_tokens=length_of(request.max_output_tokens, "max_output_tokens"),
        stop=stops_of(request.stop),
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        logprobs=asked.logprobs,
        cache_salt=salt_of(request),
        speculation=speculation_of(request),
        min_tokens=min_tokens_of(request, request.max_output_tokens),
        grammar=asked.tools.grammar or asked.grammar,
        thinking_tokens=request.thinking_token_budget,
    )


def _variables(asked: ResolvedRequest) -> Json:
    """Return the template's arguments; those that the request gives explicitly come last. An answer that follows a
    grammar has no room for reasoning."""
    variables: Json = {}
    effort, bound = asked.reasoning.effort, bool(asked.tools.forced) or asked.grammar is not None
    if effort is not None and effort != "none":
        variables = {"enable_thinking": True, "reasoning_effort": effort}
    if bound or effort == "none" or asked.request.thinking_token_budget == 0:
        variables["enable_thinking"] = False
    variables |= template_kwargs(asked.request.chat_template_kwargs)
    return variables | ({"tools": [*asked.tools.offered]} if asked.tools.offered else {})
