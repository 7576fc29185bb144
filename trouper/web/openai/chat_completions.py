"""POST /v1/chat/completions: the request."""

from __future__ import annotations

import re
from typing import Any

import attrs

from trouper.protocol.grammar import Grammar
from trouper.protocol.problems import bad_request
from trouper.protocol.requests import ChatPrompt, Generate
from trouper.web.http.body_parsing import at_most, combination, json_type, structure
from trouper.web.http.request_schema import HARMLESS, LENGTH, Json, Refused, array, limits, schema
from trouper.web.openai import schemas
from trouper.web.openai.chat_tools import MAX_TOOLS, past_calls, tools_of
from trouper.web.openai.parameters import (
    HUGE,
    NOT_SUPPORTED,
    Parameters,
    choices_of,
    length_of,
    min_tokens_of,
    salt_of,
    sampling_of,
    speculation_of,
    stops_of,
)  # fmt: skip
from trouper.web.openai.response_format import grammar_of
from trouper.web.output.tool_calls import Tools

NOT_FOR_TEMPLATES = frozenset({
    "self", "messages", "conversation", "chat_template", "tokenize", "tokenizer_kwargs", "sanitize_control_tokens",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
})  # fmt: skip
"""Names that are arguments of the tokenizer's own call, not variables of a template: padding to 10^9 tokens would take
all memory."""
TEMPLATE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TEMPLATE_KWARGS: Json = {
    "type": "object",
    "propertyNames": {"pattern": f"^{TEMPLATE_KEY.pattern}$", "not": {"enum": sorted(NOT_FOR_TEMPLATES)}},
}
PART_KEYS = frozenset({"type", "text", "cache_control", "prompt_cache_breakpoint"})
"""Keys of a content part. The last two ask for caching, which changes no output."""
ROLES = ("system", "developer", "user", "assistant", "tool")
KNOWN_KEYS = frozenset({"role", "content", "name"})
ROLE_KEYS = {
    "assistant": frozenset({"tool_calls", "reasoning_content", "annotations"}),
    "tool": frozenset({"tool_call_id"}),
}
"""Keys of an assistant message that clients send back from an earlier answer."""

REFUSED: Refused = {
    **NOT_SUPPORTED,
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
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
"""Efforts of reasoning. `none` disables it; the others are passed to the chat template, which may ignore them."""
RULES = (
    schemas.OPTIONS_NEED_A_STREAM,
    schemas.TOP_NEEDS_LOGPROBS,
    schemas.FORCED_NEEDS_TOOLS,
    schemas.ONE_STRUCTURE,
)


@attrs.frozen(kw_only=True)
class ChatRequest(Parameters):
    messages: Any = attrs.field(metadata=schema(schemas.MESSAGES))
    max_completion_tokens: int | None = attrs.field(default=None, metadata=schema(LENGTH))
    logprobs: bool = False
    top_logprobs: int | None = attrs.field(default=None, metadata=limits(0, 20))
    chat_template_kwargs: Any = attrs.field(default=None, metadata=schema(TEMPLATE_KWARGS))
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: str | None = attrs.field(default=None, metadata=schema({"enum": [*EFFORTS]}))
    thinking_token_budget: int | None = attrs.field(default=None, metadata=limits(0, HUGE))
    tools: Any = attrs.field(default=None, metadata=schema(array(schemas.TOOL, maxItems=MAX_TOOLS)))
    tool_choice: Any = attrs.field(default=None, metadata=schema(schemas.TOOL_CHOICE))
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = attrs.field(default=None, metadata=HARMLESS)
    safety_identifier: str | None = attrs.field(default=None, metadata=HARMLESS)
    prompt_cache_key: str | None = attrs.field(default=None, metadata=HARMLESS)
    prompt_cache_retention: str | None = attrs.field(default=None, metadata=HARMLESS)

    @property
    def tools_asked(self) -> Tools:
        """Parse a chat request. Raises `RequestFailed` (400)."""
        return tools_of(self.tools, self.tool_choice, self.parallel_tool_calls)


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    return structure(body, ChatRequest, REFUSED)


def chat_to_generate(request: ChatRequest, request_id: str, default_seed: int | None) -> tuple[Generate, ...]:
    """Build a request for each choice. Raises `RequestFailed` (400) naming the parameter."""
    tools = request.tools_asked
    kwargs = template_kwargs(request.chat_template_kwargs)
    if tools.offered:
        kwargs = kwargs | {"tools": [*tools.offered]}
    kwargs = _about_thinking(request, tools) | _about_the_end(request) | kwargs
    limit = request.max_completion_tokens
    name = "max_tokens" if limit is None else "max_completion_tokens"
    generate = Generate(
        request_id=request_id,
        prompt=ChatPrompt(messages_of(request.messages), kwargs),
        sampling=sampling_of(request, default_seed),
        max_tokens=length_of(request.max_tokens if limit is None else limit, name),
        stop=stops_of(request.stop),
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        logprobs=_top_logprobs(request),
        cache_salt=salt_of(request),
        speculation=speculation_of(request),
        min_tokens=min_tokens_of(request, request.max_tokens if limit is None else limit),
        grammar=_grammar(request, tools),
        thinking_tokens=request.thinking_token_budget,
    )
    return choices_of(generate, request.n)


def _about_thinking(request: ChatRequest, tools: Tools) -> dict[str, Any]:
    """Return the template's arguments about reasoning. An answer that follows a grammar has no room for it. Templates
    that do not know the arguments ignore them."""
    effort, kwargs = request.reasoning_effort, {}
    if effort is not None and effort not in EFFORTS:
        known = ", ".join(EFFORTS)
        raise bad_request(
            f"reasoning_effort must be one of {known}, not {effort!r}", "reasoning_effort", "invalid_value"
        )
    if effort is not None and effort != "none":
        kwargs = {"reasoning_effort": effort, "enable_thinking": True}
    bound = tools.forced or grammar_of(request) is not None
    return kwargs | (
        {"enable_thinking": False} if bound or effort == "none" or request.thinking_token_budget == 0 else {}
    )


def _about_the_end(request: ChatRequest) -> dict[str, Any]:
    """Whether the prompt ends with the beginning of an answer, or in the middle of the last message."""
    if not request.continue_final_message:
        return {} if request.add_generation_prompt is None else {"add_generation_prompt": request.add_generation_prompt}
    if request.add_generation_prompt:
        raise combination(
            "continue_final_message needs add_generation_prompt: false, or neither", "continue_final_message"
        )
    if messages_of(request.messages)[-1]["role"] != "assistant":
        raise combination("continue_final_message needs a last message of the assistant", "continue_final_message")
    return {"add_generation_prompt": False, "continue_final_message": True}


def _grammar(request: ChatRequest, tools: Tools) -> Grammar | None:
    asked = grammar_of(request)
    if asked is not None and tools.forced:
        raise combination(f"{asked.param} cannot be combined with a forced tool", "tool_choice")
    return tools.grammar or asked


def _top_logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise combination("top_logprobs needs logprobs: true", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def template_kwargs(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    name = "chat_template_kwargs"
    if not isinstance(value, dict):
        raise bad_request(f"{name} must be an object, not {json_type(value)}", name, "invalid_type")
    for key in value:
        if not TEMPLATE_KEY.fullmatch(key) or key in NOT_FOR_TEMPLATES:
            raise bad_request(f"{name}.{key} cannot be set", f"{name}.{key}", "invalid_value")
    return value


def messages_of(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list):
        raise bad_request(f"messages must be an array, not {json_type(value)}", "messages", "invalid_type")
    if not value:
        raise bad_request("messages is empty; send at least one", "messages", "invalid_value")
    at_most("messages", value, schemas.MAX_MESSAGES)
    return tuple(_message(message, f"messages.{index}") for index, message in enumerate(value))


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad_request(f"{path} must be an object, not {json_type(message)}", path, "invalid_type")
    role = message.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise bad_request(f"{path}.role must be one of {known}, not {role!r}", f"{path}.role", "invalid_value")
    allowed = KNOWN_KEYS | ROLE_KEYS.get(role, frozenset())
    for name, value in message.items():
        if name not in allowed and value is not None:
            raise bad_request(f"{path}.{name} is not supported here", f"{path}.{name}", "unsupported_parameter")
    given = message.get("tool_calls")
    calls = [] if given is None else past_calls(given, f"{path}.tool_calls")
    content = message.get("content")
    # Templates know "system"; "developer" is what newer clients call it.
    plain: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": "" if content is None and calls else _content(content, f"{path}.content"),
    }
    if calls:
        plain["tool_calls"] = calls
    for name in ("tool_call_id", "reasoning_content", "name"):
        if message.get(name) is not None:
            plain[name] = _string(message[name], f"{path}.{name}")
    return plain


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{path} must be a string, not {json_type(value)}", path, "invalid_type")
    return _checked_text(value, path)


def _content(value: Any, path: str) -> str:
    if isinstance(value, str):
        return _checked_text(value, path)
    if not isinstance(value, list):
        raise bad_request(f"{path} must be a string or an array of parts, not {json_type(value)}", path, "invalid_type")
    return "".join(_part(part, f"{path}.{index}") for index, part in enumerate(value))


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise bad_request(f"{path}: only parts of type text are supported, not {kind!r}", path, "unsupported_content")
    if not isinstance(part.get("text"), str):
        raise bad_request(f"{path}.text must be a string", f"{path}.text", "invalid_type")
    for name in part:
        if name not in PART_KEYS:
            raise bad_request(f"{path}.{name} is not supported here", f"{path}.{name}", "unsupported_parameter")
    return _checked_text(part["text"], f"{path}.text")


def _checked_text(text: str, path: str) -> str:
    """Return the text. A lone surrogate is refused, since it is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_request(f"{path} holds a lone surrogate", path, "invalid_text") from None
    return text
