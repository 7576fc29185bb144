"""POST /v1/messages and /v1/messages/count_tokens: the requests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import attrs

from trouper.protocol.grammar import Grammar
from trouper.protocol.problems import bad_request
from trouper.protocol.requests import ChatPrompt, Generate
from trouper.protocol.sampling import Sampling, SamplingDefaults
from trouper.web.anthropic.message_history import (
    TextContent,
    Turns,
    blocks_adapted,
    continues,
    conversation_of,
)
from trouper.web.anthropic.message_tools import (
    CustomTools,
    ToolChoiceObject,
    client_tools_adapted,
    tools_of,
)
from trouper.web.anthropic.thinking import Thinking, ThinkingParameter, thinking_of
from trouper.web.http.body_faults import explains, ordered, says
from trouper.web.http.body_parsing import combination
from trouper.web.http.field_types import (
    Count,
    Model,
    Priority,
    Salt,
    Share,
)
from trouper.web.http.image_source import ImageParts
from trouper.web.http.leniency import Adapt, Skip, known_value
from trouper.web.http.request_body import Body
from trouper.web.http.request_schema import HARMLESS, Json, Unsupported, needs
from trouper.web.openai.other_servers import (
    FORMATS,
    NOT_SKIPPED,
    length_aliases,
    sampling_adapted,
    with_thinking,
)
from trouper.web.openai.parameters import (
    FurtherSampling,
    StopStrings,
    TemplateKwargs,
    bounded_top_k,
    drawn_seed,
    template_kwargs,
    with_further,
)
from trouper.web.openai.response_format import schema_grammar
from trouper.web.output.tool_calls import Tools

_FORCED: Json = {
    "type": "object",
    "properties": {"type": {"enum": ["any", "tool"]}},
    "required": ["type"],
}
FORCED_NEEDS_TOOLS = needs("tool_choice", _FORCED, "tools", {"type": "array", "minItems": 1})
"""JSON Schema of a check in `message_tools.tools_of`."""
UNSUPPORTED: Unsupported = {
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "mcp_servers": ([],),
    "container": (),
    "inference_geo": (),
    "fallbacks": ([], "default"),
    "fallback_credit_token": (),
    "billing_policy": (),
    "compaction": (),
    "thread": (),
    "user_profile_id": (),
    "workspace_id": (),
}
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
OutputEffort = Literal["low", "medium", "high", "xhigh", "max"]
CLEAR_THINKING = "clear_thinking_20251015"
KEEPS_ALL = ("all", {"type": "all"})
ALIASES = {
    **length_aliases("max_tokens", "max_output_tokens", "max_completion_tokens"),
    "stop": "stop_sequences",
    "random_seed": "seed",
}
ESSENTIAL = NOT_SKIPPED | FORMATS | {"thread", "prompt", "input"}


def explain_edit(value: Any, path: str) -> None:
    if isinstance(value, dict):
        detail = (
            f"{path}: only {CLEAR_THINKING} with keep: all is supported here, which clears nothing"
        )
        raise bad_request(detail, path, "unsupported_parameter")


class SchemaFormat(Body, tag="json_schema", frozen=True):
    """JSON that follows a schema."""

    schema: Annotated[dict[str, Any], says("{path} must be a JSON Schema", "invalid_type")]


OutputFormat = Annotated[SchemaFormat, says("{path} must be an object of type json_schema")]


class OutputConfig(Body, kw_only=True, frozen=True):
    adapt: ClassVar[Adapt | None] = partial(known_value, "effort", EFFORTS)
    unsupported: ClassVar[Unsupported] = {"task_budget": ()}
    effort: Annotated[OutputEffort, ordered(OutputEffort)] | None = None
    format: OutputFormat | None = None


class Metadata(Body, frozen=True):
    """Changes nothing: users are not told apart."""

    user_id: Annotated[str, HARMLESS] | None = None


class KeepAll(Body, tag="all", frozen=True):
    pass


class ClearThinking(Body, tag=CLEAR_THINKING, frozen=True):
    """An edit that keeps all thinking, as the server always does."""

    keep: Literal["all"] | KeepAll


def _edits_adapted(value: Json, skip: Skip) -> Json:
    edits = value.get("edits")
    if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
        return value
    kept = [
        edit
        for edit in edits
        if edit.get("type") == CLEAR_THINKING and edit.get("keep") in KEEPS_ALL
    ]
    if len(kept) < len(edits):
        skip("edits")
    return value | {"edits": kept}


class ContextManagement(Body, frozen=True):
    """Changes nothing: all thinking is kept anyway."""

    adapt: ClassVar[Adapt | None] = _edits_adapted
    edits: list[Annotated[ClearThinking, explains(explain_edit)]] | None = None


def _adapted(value: Json, skip: Skip) -> Json:
    value = sampling_adapted(value, ALIASES, ("max_tokens",), skip)
    value = with_thinking(value, value.pop("enable_thinking", None), skip)
    value = blocks_adapted(client_tools_adapted(value, skip), skip)
    if isinstance(value.get("stop_sequences"), str):
        value["stop_sequences"] = [value["stop_sequences"]]
    if type(value.get("top_k")) is int and value["top_k"] < 0:
        value["top_k"] = 0  # Other servers' form of all tokens.
    temperature = value.get("temperature")
    if isinstance(temperature, int | float) and 1 < temperature <= 2:
        value["temperature"] = 1.0
        skip("temperature")
    return value


class CountRequest(FurtherSampling, kw_only=True, frozen=True):
    """A conversation whose tokens are counted."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED
    essential: ClassVar[frozenset[str]] = ESSENTIAL
    aliases: ClassVar[Mapping[str, str]] = ALIASES
    adapt: ClassVar[Adapt | None] = _adapted
    rules: ClassVar[tuple[Json, ...]] = (FORCED_NEEDS_TOOLS,)
    messages: Turns
    model: Model | None = None
    max_tokens: Count | None = None
    system: TextContent | None = None
    tools: CustomTools | None = None
    tool_choice: ToolChoiceObject | None = None
    thinking: ThinkingParameter | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    stop_sequences: StopStrings | None = None
    # None: as the model's generation_config.json says, else off (temperature 1).
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    stream: bool = False
    cache_control: Annotated[dict[str, Any], HARMLESS] | None = None
    context_management: ContextManagement | None = None
    diagnostics: Annotated[dict[str, Any], HARMLESS] | None = None
    metadata: Metadata | None = None
    # Extensions of this server.
    min_p: Share | None = None
    seed: int | None = None
    min_tokens: Count = 0
    ignore_eos: bool = False
    cache_salt: Salt | None = None
    priority: Priority | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    @property
    def parsed_tools(self) -> Tools:
        """Raises `RequestFailed` (400), as the properties below."""
        return tools_of(self.tools, self.tool_choice)

    @property
    def parsed_thinking(self) -> Thinking:
        return thinking_of(self.thinking, self.max_tokens)

    @property
    def parsed_output(self) -> Output:
        return _output(self.output_config or OutputConfig(), self.output_format)


class MessagesRequest(CountRequest, kw_only=True, frozen=True):
    """A conversation to answer."""

    max_tokens: Count


@attrs.frozen
class Output:
    effort: str | None = None
    grammar: Grammar | None = None


def _sampling(request: MessagesRequest, defaults: SamplingDefaults) -> Sampling:
    sampling = defaults.fill(
        Sampling(seed=drawn_seed(request.seed, defaults.seed)),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=bounded_top_k(request.top_k),
        min_p=request.min_p,
    )
    return with_further(sampling, request)


def messages_to_generate(
    request: MessagesRequest,
    request_id: str,
    defaults: SamplingDefaults,
    images: ImageParts | None = None,
) -> Generate:
    """`images` reads the images. Raises `RequestFailed` (400)."""
    if request.min_tokens > request.max_tokens:
        raise combination(
            f"min_tokens must be at most max_tokens, which is {request.max_tokens}", "min_tokens"
        )
    return Generate(
        request_id=request_id,
        prompt=prompt_of(request, images),
        sampling=_sampling(request, defaults),
        # With max_tokens 0 one token is generated and not shown.
        max_tokens=request.max_tokens or 1,
        # Agents request as many tokens as the largest models can generate.
        as_room_allows=True,
        stop=tuple(dict.fromkeys(request.stop_sequences or ())),
        ignore_eos=request.ignore_eos,
        cache_salt=request.cache_salt or "",
        min_tokens=request.min_tokens,
        thinking_token_budget=request.parsed_thinking.budget,
        grammar=request.parsed_tools.grammar or request.parsed_output.grammar,
    )


def prompt_of(request: CountRequest, images: ImageParts | None = None) -> ChatPrompt:
    images = ImageParts() if images is None else images
    tools, thinking, output = request.parsed_tools, request.parsed_thinking, request.parsed_output
    _check_together(tools, thinking, output)
    messages = conversation_of(request.system, request.messages, tools, images)
    bound = bool(tools.forced) or output.grammar is not None
    kwargs: Json = {"enable_thinking": thinking.enabled and not bound}
    if output.effort is not None:
        kwargs["reasoning_effort"] = output.effort
    kwargs |= template_kwargs(request.chat_template_kwargs)
    if tools.described:
        kwargs["tools"] = tools.described
    if continues(messages):
        kwargs |= {"add_generation_prompt": False, "continue_final_message": True}
    return ChatPrompt(messages, kwargs, images.unread)


def _check_together(tools: Tools, thinking: Thinking, output: Output) -> None:
    """A grammar leaves no room for thinking."""
    if thinking.budget and (tools.forced or output.grammar is not None):
        other = "a forced tool" if tools.forced else "output_config.format"
        raise combination(f"thinking of type enabled cannot be combined with {other}", "thinking")


def _output(config: OutputConfig, older: SchemaFormat | None) -> Output:
    if config.format is not None and older is not None:
        raise combination(
            "output_format is the older name of output_config.format", "output_format"
        )
    effort = None if config.effort is None else EFFORTS[config.effort]
    if older is not None:
        return Output(effort, schema_grammar(older.schema, "output_format.schema"))
    if config.format is None:
        return Output(effort)
    return Output(effort, schema_grammar(config.format.schema, "output_config.format.schema"))
