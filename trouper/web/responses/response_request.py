from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, get_args

import attrs
from msgspec import Meta

from trouper.actors.runtime.prompt_tokenizing import check_text
from trouper.protocol.grammar import Grammar
from trouper.protocol.problems import bad_request
from trouper.protocol.requests import ChatPrompt, Generate
from trouper.protocol.sampling import Sampling, SamplingDefaults
from trouper.web.http.body_faults import explains, ordered, says
from trouper.web.http.body_parsing import combination, json_type
from trouper.web.http.field_types import HUGE, Count, Length
from trouper.web.http.leniency import Adapt, Skip, known_value, put
from trouper.web.http.request_body import Body, Report, refuse, structure
from trouper.web.http.request_schema import HARMLESS, Json, Unsupported
from trouper.web.openai import schemas as openai_schemas
from trouper.web.openai.other_servers import (
    BUDGETS,
    FORMATS,
    NOT_SKIPPED,
    SAMPLING,
    choice_adapted,
    format_adapted,
    length_aliases,
    sampling_adapted,
    thinking_adapted,
    tools_adapted,
    with_thinking,
)
from trouper.web.openai.parameters import (
    SamplingParameters,
    TemplateKwargs,
    generate_of,
    template_kwargs,
)
from trouper.web.openai.response_format import TextOutputFormat, format_grammar
from trouper.web.output.tool_calls import Tools
from trouper.web.responses import schemas
from trouper.web.responses.items import Input, known_items, with_types
from trouper.web.responses.response_tools import (
    TOOL_TYPES,
    FlatToolChoice,
    FlatTools,
    is_hosted,
    tools_of,
)

MAX_DEPTH = 256
"""Nesting of values that are returned or passed to a template."""
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
UNSUPPORTED: Unsupported = {
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "context_management": ([],),
    "background_options": ({}, {"completion_window": "soonest"}),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "moderation": (),
    "access_programs": (),
    "image": (),
    "modalities": (["text"],),
}
ALIASES = {
    **length_aliases("max_output_tokens", "max_tokens", "max_completion_tokens"),
    **SAMPLING,
    **BUDGETS,
}
ESSENTIAL = NOT_SKIPPED | FORMATS | {"conversation", "prompt", "messages"}


def explain_metadata(value: Any, path: str) -> None:
    if not isinstance(value, dict):
        raise bad_request(f"{path} must be an object, not {json_type(value)}", path, "invalid_type")
    for key, item in value.items() if len(value) <= MAX_METADATA else ():
        if (
            len(key) > MAX_METADATA_KEY
            or not isinstance(item, str)
            or len(item) > MAX_METADATA_VALUE
        ):
            path = f"{path}.{key[:MAX_METADATA_KEY]}"
            limits = (
                f"a string of at most {MAX_METADATA_VALUE} characters, its name of "
                f"{MAX_METADATA_KEY}"
            )
            raise bad_request(f"{path} must be {limits}", path, "invalid_value")


Key = Annotated[str, Meta(max_length=MAX_METADATA_KEY)]
ResponseMetadata = Annotated[
    dict[Key, Annotated[str, Meta(max_length=MAX_METADATA_VALUE)]],
    explains(
        explain_metadata,
        max_length=MAX_METADATA,
        description="Changes nothing: it is returned to the client.",
    ),
]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Included = Annotated[
    Literal["message.output_text.logprobs", "reasoning.encrypted_content"],
    says(
        "{path} must be one of message.output_text.logprobs, reasoning.encrypted_content, not "
        "{value!r}",
        description=(
            "The latter asks to carry reasoning on the client's side. It is returned in plain text."
        ),
    ),
]


INCLUDED = get_args(get_args(Included)[0])


class ReasoningOptions(Body, kw_only=True, frozen=True):
    """Reasoning is returned as generated, as no second model summarizes."""

    adapt: ClassVar[Adapt | None] = partial(known_value, "effort", get_args(ReasoningEffort))
    unsupported: ClassVar[Unsupported] = {
        "summary": ("auto",),
        "generate_summary": ("auto",),
        "context": ("auto",),
        "mode": ("standard",),
    }
    effort: Annotated[ReasoningEffort, ordered(ReasoningEffort)] | None = None


def _text_adapted(value: Json, _: Skip) -> Json:
    return value | {"format": format_adapted(value.get("format"), flat=True)}


class TextOptions(Body, kw_only=True, frozen=True):
    unsupported: ClassVar[Unsupported] = {"verbosity": ("medium",)}
    adapt: ClassVar[Adapt | None] = _text_adapted
    format: TextOutputFormat | None = None


class ResponseStreamOptions(Body, frozen=True):
    """Stream options. None is read: all are refused or neutral."""

    unsupported: ClassVar[Unsupported] = {"include_obfuscation": (False,)}


def _adapted(value: Json, skip: Skip) -> Json:
    """Convert other servers' forms: a chat's effort, and OpenRouter's budget, to `reasoning`."""
    value = thinking_adapted(sampling_adapted(value, ALIASES, ("max_output_tokens",), skip), skip)
    value = _included(_tools_adapted(value, skip), skip)
    reasoning, effort = value.get("reasoning"), value.pop("reasoning_effort", None)
    if not isinstance(reasoning, dict | None):
        return value
    inner = {**(reasoning or {})}
    put(inner, "effort", effort, lambda _: skip("reasoning_effort"))
    enabled = inner.pop("enabled", None)
    if enabled is False:
        inner["effort"] = "none"
    elif enabled is not None:
        value = with_thinking(value, enabled, skip)
    put(value, "thinking_token_budget", inner.pop("max_tokens", None), skip)
    return value | ({"reasoning": inner} if inner else {})


def _included(value: Json, skip: Skip) -> Json:
    """Drop `include` fields of tools that run elsewhere."""
    given = value.get("include")
    if not isinstance(given, list):
        return value
    for other in (name for name in given if isinstance(name, str) and name not in INCLUDED):
        skip(f"include.{other}")
    return value | {
        "include": [name for name in given if not isinstance(name, str) or name in INCLUDED]
    }


def _tools_adapted(value: Json, skip: Skip) -> Json:
    """Drop tools that run elsewhere and items of such calls; offer tools from items."""
    items, tools = known_items(value.get("input"), skip)
    if tools and isinstance(value.get("tools"), list | None):
        offered = value.get("tools") or []
        value = value | {"tools": [*offered, *(tool for tool in tools if tool not in offered)]}
    if isinstance(sent := value.get("tools"), list):
        for tool in filter(is_hosted, sent):
            skip(f"tools.{tool['type']}")
        value = value | {"tools": [tool for tool in sent if not is_hosted(tool)]}
    value = choice_adapted(tools_adapted(value, TOOL_TYPES, skip), nested=False)
    return value | {"input": items} if items is not None else value


class ResponseRequest(SamplingParameters, kw_only=True, frozen=True):
    unsupported: ClassVar[Unsupported] = UNSUPPORTED
    essential: ClassVar[frozenset[str]] = ESSENTIAL
    aliases: ClassVar[Mapping[str, str]] = ALIASES
    adapt: ClassVar[Adapt | None] = _adapted
    rules: ClassVar[tuple[Json, ...]] = (
        schemas.SOMETHING,
        schemas.TOP_NEEDS_INCLUDE,
        openai_schemas.OPTIONS_NEED_A_STREAM,
        openai_schemas.FORCED_NEEDS_TOOLS,
    )
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Length | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[Included] | None = None
    tools: FlatTools | None = None
    tool_choice: FlatToolChoice | None = None
    parallel_tool_calls: bool = True
    max_tool_calls: (
        Annotated[int, Meta(ge=1, le=HUGE, description="Changes nothing: no tool is hosted here.")]
        | None
    ) = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: Count | None = None
    store: bool = True
    background: bool = False
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    metadata: ResponseMetadata | None = None
    client_metadata: Annotated[dict[str, Any], HARMLESS] | None = None
    safety_identifier: Annotated[str, HARMLESS] | None = None
    prompt_cache_key: Annotated[str, HARMLESS] | None = None
    prompt_cache_retention: Annotated[str, HARMLESS] | None = None


@attrs.frozen(kw_only=True)
class ResolvedRequest:
    request: ResponseRequest
    tools: Tools
    grammar: Grammar | None
    logprobs: int | None
    given: Json
    """The body as sent; the response repeats some values."""
    sampling: Sampling = Sampling()
    """With the model's defaults, once the model is leased."""

    @property
    def effort(self) -> str | None:
        return self.request.reasoning.effort if self.request.reasoning is not None else None


def parse_response(body: Json, report: Report = refuse) -> ResolvedRequest:
    """Raises `RequestFailed` (400) naming the parameter."""
    for name, value in body.items():
        # Most fields are returned, and half a surrogate pair cannot be encoded.
        check_text(value, name)
        if name in ("tools", "tool_choice", "text", "chat_template_kwargs"):
            _check_depth(value, name)
    body = body | {"input": with_types(body.get("input"))}
    return _resolved(structure(body, ResponseRequest, report), body)


def _check_depth(value: Any, name: str) -> None:
    """Bound the nesting: parsing allows values too deep to encode inside another value."""
    inside = [value]
    for _ in range(MAX_DEPTH):
        inside = [inner for outer in inside for inner in _inside(outer)]
        if not inside:
            return
    raise bad_request(f"{name} is nested more than {MAX_DEPTH} times", name, "invalid_value")


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _resolved(request: ResponseRequest, given: Json) -> ResolvedRequest:
    """Check rules that no type expresses. Raises `RequestFailed` (400) naming the parameter."""
    tools = tools_of(request.tools, request.tool_choice, several=request.parallel_tool_calls)
    # The field's word
    format = request.text.format if request.text is not None else None  # noqa: A001
    grammar = None if format is None else format_grammar(format, "text.format")
    if request.stream_options is not None and not request.stream:
        raise combination("stream_options needs stream: true", "stream_options")
    if request.background and not request.store:
        raise combination("background needs store: true", "background")
    return ResolvedRequest(
        request=request, tools=tools, grammar=grammar, logprobs=_logprobs(request), given=given
    )


def _logprobs(request: ResponseRequest) -> int | None:
    if schemas.LOGPROBS in (request.include or ()):
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise combination(f"top_logprobs needs {schemas.LOGPROBS!r} in include", "top_logprobs")
    return None


# -- what it becomes -----------------------------------------------------------------------------


def response_to_generate(
    resolved: ResolvedRequest,
    messages: tuple[Json, ...],
    request_id: str,
    defaults: SamplingDefaults,
    unread: tuple[str, ...] = (),
) -> Generate:
    """Build the runtime's request. `unread`: types of parts that are placeholders in `messages`.
    Raises `RequestFailed` (400) naming the parameter."""
    request = resolved.request
    prompt = ChatPrompt(messages, _variables(resolved), unread)
    return attrs.evolve(
        generate_of(request, request_id, prompt, defaults, request.max_output_tokens),
        logprobs=resolved.logprobs,
        grammar=resolved.tools.grammar or resolved.grammar,
        thinking_token_budget=request.thinking_token_budget,
    )


def _variables(resolved: ResolvedRequest) -> Json:
    """Return the template's arguments, the explicit ones last. Answers under a grammar have no
    reasoning."""
    variables: Json = {}
    effort, bound = resolved.effort, bool(resolved.tools.forced) or resolved.grammar is not None
    if effort is not None and effort != "none":
        variables = {"enable_thinking": True, "reasoning_effort": effort}
    if bound or effort == "none" or resolved.request.thinking_token_budget == 0:
        variables["enable_thinking"] = False
    variables |= template_kwargs(resolved.request.chat_template_kwargs)
    return variables | ({"tools": resolved.tools.described} if resolved.tools.described else {})
