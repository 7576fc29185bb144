"""POST /v1/messages and /v1/messages/count_tokens: the requests."""

from __future__ import annotations

from typing import Any

import attrs

from trouper.protocol.grammar import Grammar
from trouper.protocol.problems import bad_request
from trouper.protocol.requests import ChatPrompt, Generate
from trouper.protocol.sampling import Sampling
from trouper.web.anthropic import schemas
from trouper.web.anthropic.message_history import continues, conversation_of
from trouper.web.anthropic.message_tools import tools_of
from trouper.web.anthropic.thinking import THINKING, Thinking, thinking_of
from trouper.web.http.body_parsing import combination, json_type, only, structure
from trouper.web.http.request_schema import HARMLESS, Json, Refused, limits, schema, schema_of
from trouper.web.openai.chat_completions import TEMPLATE_KWARGS, template_kwargs
from trouper.web.openai.parameters import HUGE, MAX_STOPS, drawn_seed
from trouper.web.openai.response_format import schema_grammar
from trouper.web.output.tool_calls import Tools

REFUSED: Refused = {
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
"""Unsupported parameters of the API, and the values of each that request nothing."""
RULES = (schemas.FORCED_NEEDS_TOOLS,)
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Efforts by the names of those chat templates that read one."""
OUTPUT_REFUSED: Refused = {"task_budget": ()}


@attrs.frozen(kw_only=True)
class OutputConfig:
    effort: str | None = attrs.field(default=None, metadata=limits(enum=[*EFFORTS]))
    format: Any = attrs.field(default=None, metadata=schema(schemas.FORMAT))


@attrs.frozen(kw_only=True)
class Metadata:
    user_id: str | None = attrs.field(default=None, metadata=HARMLESS)


@attrs.frozen(kw_only=True)
class CountRequest:
    """The fields that make the prompt. The other fields of a messages request do not change the count."""

    messages: Any = attrs.field(metadata=schema(schemas.MESSAGES))
    model: str | None = None
    max_tokens: int | None = attrs.field(default=None, metadata=limits(0, HUGE))
    system: Any = attrs.field(default=None, metadata=schema(schemas.TEXTS))
    tools: Any = attrs.field(default=None, metadata=schema(schemas.TOOLS))
    tool_choice: Any = attrs.field(default=None, metadata=schema(schemas.TOOL_CHOICE))
    thinking: Any = attrs.field(default=None, metadata=schema(THINKING))
    output_config: dict[str, Any] | None = attrs.field(
        default=None, metadata=schema(schema_of(OutputConfig, OUTPUT_REFUSED))
    )
    output_format: Any = attrs.field(default=None, metadata=schema(schemas.FORMAT))
    stop_sequences: Any = attrs.field(default=None, metadata=schema(schemas.STOPS))
    temperature: float = attrs.field(default=1.0, metadata=limits(0, 1))
    top_p: float = attrs.field(default=1.0, metadata=limits(above=0, high=1))
    top_k: int = attrs.field(default=0, metadata=limits(0, HUGE))
    stream: bool = False
    cache_control: dict[str, Any] | None = attrs.field(default=None, metadata=HARMLESS)
    context_management: dict[str, Any] | None = attrs.field(
        default=None, metadata=schema(schemas.CONTEXT_MANAGEMENT, harmless=True)
    )
    diagnostics: dict[str, Any] | None = attrs.field(default=None, metadata=HARMLESS)
    metadata: dict[str, Any] | None = attrs.field(default=None, metadata=schema(schema_of(Metadata, {}), harmless=True))
    # Extensions of this server.
    min_p: float = attrs.field(default=0.0, metadata=limits(0, 1))
    seed: int | None = None
    min_tokens: int = attrs.field(default=0, metadata=limits(0, HUGE))
    ignore_eos: bool = False
    cache_salt: str | None = attrs.field(default=None, metadata=limits(maxLength=1024))
    chat_template_kwargs: Any = attrs.field(default=None, metadata=schema(TEMPLATE_KWARGS))

    @property
    def tools_asked(self) -> Tools:
        """Return the parsed tools. Like the properties below, raises `RequestFailed` (400)."""
        return tools_of(self.tools, self.tool_choice)

    @property
    def thinking_asked(self) -> Thinking:
        return thinking_of(self.thinking, self.max_tokens)

    @property
    def output_asked(self) -> Output:
        return _output(self.output_config or {}, self.output_format)


@attrs.frozen(kw_only=True)
class MessagesRequest(CountRequest):
    max_tokens: int = attrs.field(metadata=limits(0, HUGE))


@attrs.frozen
class Output:
    """The format of the answer, and its effort."""

    effort: str | None = None
    grammar: Grammar | None = None


def parse_messages(body: Json) -> MessagesRequest:
    return structure(body, MessagesRequest, REFUSED)


def parse_count(body: Json) -> CountRequest:
    return structure(body, CountRequest, REFUSED)


def messages_to_generate(request: MessagesRequest, request_id: str, default_seed: int | None) -> Generate:
    """Build the request for the runtime. Raises `RequestFailed` (400) naming the parameter."""
    if request.min_tokens > request.max_tokens:
        raise combination(f"min_tokens must be at most max_tokens, which is {request.max_tokens}", "min_tokens")
    return Generate(
        request_id=request_id,
        prompt=prompt_of(request),
        sampling=Sampling(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=min(request.top_k, 2**30),
            min_p=request.min_p,
            seed=drawn_seed(request.seed, default_seed),
        ),
        # With max_tokens 0 only the prompt is to be computed; one token is generated after it, and not shown.
        max_tokens=request.max_tokens or 1,
        # Agents request as many tokens as the largest models can generate.
        as_room_allows=True,
        stop=_stops(request.stop_sequences),
        ignore_eos=request.ignore_eos,
        cache_salt=request.cache_salt or "",
        min_tokens=request.min_tokens,
        thinking_tokens=request.thinking_asked.budget,
        grammar=request.tools_asked.grammar or request.output_asked.grammar,
    )


def prompt_of(request: CountRequest) -> ChatPrompt:
    """Build the prompt. Raises `RequestFailed` (400) naming the parameter."""
    _check_unused(request)
    tools, thinking, output = request.tools_asked, request.thinking_asked, request.output_asked
    _check_together(tools, thinking, output)
    messages = conversation_of(request.system, request.messages)
    bound = bool(tools.forced) or output.grammar is not None
    kwargs: Json = {"enable_thinking": thinking.enabled and not bound}
    if output.effort is not None:
        kwargs["reasoning_effort"] = output.effort
    kwargs |= template_kwargs(request.chat_template_kwargs)
    if tools.offered:
        kwargs["tools"] = [*tools.offered]
    if continues(messages):
        kwargs |= {"add_generation_prompt": False, "continue_final_message": True}
    return ChatPrompt(messages, kwargs)


def _check_together(tools: Tools, thinking: Thinking, output: Output) -> None:
    """Refuse combinations with a grammar, which applies from the first token on, so nothing else can come before."""
    if output.grammar is not None and tools.offered:
        detail = f"{output.grammar.param} cannot be combined with tools, unless tool_choice is of type none"
        raise combination(detail, "tools")
    if thinking.budget and (tools.forced or output.grammar is not None):
        other = "a forced tool" if tools.forced else "output_config.format"
        raise combination(f"thinking of type enabled cannot be combined with {other}", "thinking")


def _stops(value: Any) -> tuple[str, ...]:
    name = "stop_sequences"
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(stop, str) for stop in value):
        raise bad_request(f"{name} must be an array of strings", name, "invalid_type")
    if len(value) > MAX_STOPS:
        raise bad_request(f"{name} may have {MAX_STOPS} strings, not {len(value)}", name, "invalid_value")
    if "" in value:
        raise bad_request(f"{name}: none may be empty", name, "invalid_value")
    return tuple(dict.fromkeys(value))


def _output(config: Json, older: Any) -> Output:
    asked = structure(config, OutputConfig, OUTPUT_REFUSED, within="output_config.")
    if asked.format is not None and older is not None:
        raise combination("output_format is the older name of output_config.format", "output_format")
    effort = None if asked.effort is None else EFFORTS[asked.effort]
    if older is not None:
        return Output(effort, _format(older, "output_format"))
    return Output(effort, None if asked.format is None else _format(asked.format, "output_config.format"))


def _format(value: Any, path: str) -> Grammar:
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        raise bad_request(f"{path} must be an object of type json_schema", path, "invalid_value")
    only(value, {"type", "schema"}, path)
    if not isinstance(value.get("schema"), dict):
        raise bad_request(f"{path}.schema must be a JSON Schema", f"{path}.schema", "invalid_type")
    return schema_grammar(value["schema"], f"{path}.schema")


def _check_unused(request: CountRequest) -> None:
    """Check the parameters that change nothing, or not the prompt: they must still be valid."""
    _stops(request.stop_sequences)
    structure(request.metadata or {}, Metadata, {}, within="metadata.")
    context = request.context_management or {}
    only(context, {"edits"}, "context_management")
    edits, path = context.get("edits"), "context_management.edits"
    if not isinstance(edits, list | None):
        raise bad_request(f"{path} must be an array, not {json_type(edits)}", path, "invalid_type")
    for index, edit in enumerate(edits or ()):
        _check_edit(edit, f"{path}.{index}")


def _check_edit(edit: Any, path: str) -> None:
    """Accept an edit that keeps all thinking, which happens anyway; agents request it."""
    if not isinstance(edit, dict):
        raise bad_request(f"{path} must be an object, not {json_type(edit)}", path, "invalid_type")
    only(edit, {"type", "keep"}, path)
    if edit.get("type") != schemas.CLEAR_THINKING or edit.get("keep") not in schemas.KEEP_ALL:
        detail = f"{path}: only {schemas.CLEAR_THINKING} with keep: all is supported here, which clears nothing"
        raise bad_request(detail, path, "unsupported_parameter")
