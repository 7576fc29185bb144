"""POST /v1/chat/completions: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol, get_args

import attrs
from msgspec import Meta

from trouper.protocol.grammar import Grammar
from trouper.protocol.requests import ChatPrompt, Generate
from trouper.protocol.sampling import SamplingDefaults
from trouper.web.http.body_faults import ordered
from trouper.web.http.body_parsing import combination
from trouper.web.http.field_types import Count, Length
from trouper.web.http.image_source import ImageParts
from trouper.web.http.leniency import Adapt, Skip
from trouper.web.http.request_schema import HARMLESS, Json, Unsupported
from trouper.web.openai import schemas
from trouper.web.openai.chat_messages import AssistantMessage, Messages, messages_of
from trouper.web.openai.chat_tools import ChatTools, ToolChoice, tools_of
from trouper.web.openai.other_servers import (
    BUDGETS,
    SAMPLING,
    STRUCTURES,
    chat_adapted,
    choice_adapted,
    format_adapted,
    length_aliases,
    reasoning_adapted,
    sampling_adapted,
    thinking_adapted,
)
from trouper.web.openai.parameters import (
    UNSUPPORTED_SAMPLING,
    Parameters,
    TemplateKwargs,
    choices_of,
    generate_of,
    template_kwargs,
)
from trouper.web.openai.response_format import grammar_of
from trouper.web.output.tool_calls import Tools

UNSUPPORTED: Unsupported = {
    **UNSUPPORTED_SAMPLING,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "echo": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
}
ALIASES = {**length_aliases("max_tokens", "max_output_tokens"), **SAMPLING, **STRUCTURES, **BUDGETS}
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""The chat template may ignore an effort; `none` disables reasoning."""
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]


def _adapted(value: Json, skip: Skip) -> Json:
    value = sampling_adapted(value, ALIASES, ("max_tokens", "max_completion_tokens"), skip)
    value = reasoning_adapted(thinking_adapted(value, skip), get_args(Effort), skip)
    value = choice_adapted(chat_adapted(value, skip), nested=True)
    return value | {"response_format": format_adapted(value.get("response_format"), flat=False)}


class ChatRequest(Parameters, kw_only=True, frozen=True):
    unsupported: ClassVar[Unsupported] = UNSUPPORTED
    aliases: ClassVar[Mapping[str, str]] = ALIASES
    adapt: ClassVar[Adapt | None] = _adapted
    rules: ClassVar[tuple[Json, ...]] = (
        schemas.OPTIONS_NEED_A_STREAM,
        schemas.TOP_NEEDS_LOGPROBS,
        schemas.FORCED_NEEDS_TOOLS,
        schemas.ONE_STRUCTURE,
    )
    messages: Messages
    max_completion_tokens: Length | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: Annotated[Effort, ordered(Effort)] | None = None
    thinking_token_budget: Count | None = None
    tools: ChatTools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, Any], HARMLESS] | None = None
    safety_identifier: Annotated[str, HARMLESS] | None = None
    prompt_cache_key: Annotated[str, HARMLESS] | None = None
    prompt_cache_retention: Annotated[str, HARMLESS] | None = None

    @property
    def parsed_tools(self) -> Tools:
        """Raises `RequestFailed` (400)."""
        return tools_of(self.tools, self.tool_choice, self.parallel_tool_calls)


def chat_to_generate(
    request: ChatRequest,
    request_id: str,
    defaults: SamplingDefaults,
    images: ImageParts | None = None,
) -> tuple[Generate, ...]:
    """`images` reads the images. Raises `RequestFailed` (400)."""
    images = ImageParts() if images is None else images
    tools = request.parsed_tools
    kwargs = template_kwargs(request.chat_template_kwargs)
    if tools.described:
        kwargs = kwargs | {"tools": tools.described}
    kwargs = _about_thinking(request, tools) | about_the_end(request) | kwargs
    limit = (
        request.max_tokens
        if request.max_completion_tokens is None
        else request.max_completion_tokens
    )
    messages = messages_of(request.messages, tools, images)
    prompt = ChatPrompt(messages, kwargs, images.unread)
    generate = attrs.evolve(
        generate_of(request, request_id, prompt, defaults, limit),
        logprobs=_top_logprobs(request),
        grammar=_grammar(request, tools),
        thinking_token_budget=request.thinking_token_budget,
    )
    return choices_of(generate, request.n)


class EndsConversation(Protocol):
    """A conversation whose last message may go on."""

    @property
    def messages(self) -> Messages | None: ...

    @property
    def add_generation_prompt(self) -> bool | None: ...

    @property
    def continue_final_message(self) -> bool: ...


def _about_thinking(request: ChatRequest, tools: Tools) -> dict[str, Any]:
    """An answer by a grammar has no room for reasoning."""
    effort, kwargs = request.reasoning_effort, {}
    if effort is not None and effort != "none":
        kwargs = {"reasoning_effort": effort, "enable_thinking": True}
    bound = tools.forced or grammar_of(request) is not None
    return kwargs | (
        {"enable_thinking": False}
        if bound or effort == "none" or request.thinking_token_budget == 0
        else {}
    )


def about_the_end(request: EndsConversation) -> dict[str, Any]:
    """Return the template's variables for the end of a conversation."""
    if not request.continue_final_message:
        return (
            {}
            if request.add_generation_prompt is None
            else {"add_generation_prompt": request.add_generation_prompt}
        )
    if request.add_generation_prompt:
        raise combination(
            "continue_final_message needs add_generation_prompt: false, or neither",
            "continue_final_message",
        )
    if not isinstance((request.messages or (None,))[-1], AssistantMessage):
        raise combination(
            "continue_final_message needs a last message of the assistant", "continue_final_message"
        )
    return {"add_generation_prompt": False, "continue_final_message": True}


def _grammar(request: ChatRequest, tools: Tools) -> Grammar | None:
    """A format beside a forced tool is for the answer after the call."""
    grammar = grammar_of(request)
    return tools.grammar or grammar


def _top_logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs and not request.logprobs:
        raise combination("top_logprobs needs logprobs: true", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None
