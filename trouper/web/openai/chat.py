"""POST /v1/chat/completions: the request."""

from __future__ import annotations

from typing import Any

import attrs

from trouper.protocol.errors import bad_request
from trouper.protocol.grammar import Grammar
from trouper.protocol.requests import ChatPrompt, Generate
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
from trouper.web.openai.tools import past_calls, tools_of
from trouper.web.parsing import between, json_type, structure
from trouper.web.tools import Tools

NOT_FOR_TEMPLATES = frozenset({
    "self", "messages", "conversation", "chat_template", "tokenize", "tokenizer_kwargs", "sanitize_control_tokens",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
})  # fmt: skip
"""Arguments of the tokenizer's own call, not variables of a template: to pad to 10^9 tokens takes all memory."""
PART_KEYS = frozenset({"type", "text", "cache_control", "prompt_cache_breakpoint"})
"""The last two ask for caching, which changes no output."""
ROLES = ("system", "developer", "user", "assistant", "tool")
KNOWN_KEYS = frozenset({"role", "content", "name"})
ROLE_KEYS = {
    "assistant": frozenset({"tool_calls", "reasoning_content", "refusal", "audio", "function_call", "annotations"}),
    "tool": frozenset({"tool_call_id"}),
}
"""What clients send back of an earlier answer."""
MAX_TOP_LOGPROBS = 20

REFUSED: dict[str, tuple[Any, ...]] = NOT_SUPPORTED | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "echo": (False,),
}


@attrs.frozen(kw_only=True)
class ChatRequest(Parameters):
    messages: Any
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    metadata: Any = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def tools_asked(self) -> Tools:
        """Raises `RequestFailed` (400)."""
        return tools_of(self.tools, self.tool_choice, self.parallel_tool_calls)


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    return structure(body, ChatRequest, REFUSED)


def chat_to_generate(request: ChatRequest, request_id: str, default_seed: int | None) -> tuple[Generate, ...]:
    """One for each choice. Raises `RequestFailed` (400) naming the parameter."""
    between("n", request.n, 1, MAX_CHOICES)
    tools = request.tools_asked
    kwargs = template_kwargs(request.chat_template_kwargs)
    if tools.offered:
        kwargs = kwargs | {"tools": [*tools.offered]}
    if tools.forced:
        kwargs = {"enable_thinking": False} | kwargs
    limit = request.max_completion_tokens
    name = "max_tokens" if limit is None else "max_completion_tokens"
    generate = Generate(
        request_id=request_id,
        prompt=ChatPrompt(messages_of(request.messages), kwargs),
        sampling=sampling_of(request, default_seed),
        max_tokens=length_of(request.max_tokens if limit is None else limit, name),
        stop=stops_of(request.stop),
        stop_token_ids=stop_tokens_of(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logprobs=_top_logprobs(request),
        cache_salt=salt_of(request),
        min_tokens=least_of(request, request.max_tokens if limit is None else limit),
        grammar=_grammar(request, tools),
    )
    return choices_of(generate, request.n)


def _grammar(request: ChatRequest, tools: Tools) -> Grammar | None:
    asked = grammar_of(request)
    if asked is not None and tools.forced:
        raise bad_request(f"{asked.param} cannot be combined with a forced tool", "tool_choice", "invalid_value")
    return tools.grammar or asked


def _top_logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs is not None:
        between("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if not request.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    return (request.top_logprobs or 0) if request.logprobs else None


def template_kwargs(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    name = "chat_template_kwargs"
    if not isinstance(value, dict):
        raise bad_request(f"{name} must be an object, not {json_type(value)}", name, "invalid_type")
    for key in value:
        if not key.isidentifier() or key in NOT_FOR_TEMPLATES:
            raise bad_request(f"{name}.{key} cannot be set", f"{name}.{key}", "invalid_value")
    return value


def messages_of(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list):
        raise bad_request(f"messages must be an array, not {json_type(value)}", "messages", "invalid_type")
    if not value:
        raise bad_request("messages is empty; send at least one", "messages", "invalid_value")
    return tuple(_message(message, f"messages.{place}") for place, message in enumerate(value))


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
    calls = past_calls(message["tool_calls"], f"{path}.tool_calls") if message.get("tool_calls") else []
    content = message.get("content")
    # Templates know "system"; "developer" is what newer clients call it.
    plain: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": "" if content is None and calls else _content(content, f"{path}.content"),
    }
    if calls:
        plain["tool_calls"] = calls
    for name in ("tool_call_id", "reasoning_content"):
        if message.get(name) is not None:
            plain[name] = _content(message[name], f"{path}.{name}")
    name = message.get("name")
    if name is None:
        return plain
    if not isinstance(name, str):
        raise bad_request(f"{path}.name must be a string, not {json_type(name)}", f"{path}.name", "invalid_type")
    return plain | {"name": _whole(name, f"{path}.name")}


def _content(value: Any, path: str) -> str:
    if isinstance(value, str):
        return _whole(value, path)
    if not isinstance(value, list):
        raise bad_request(f"{path} must be a string or an array of parts, not {json_type(value)}", path, "invalid_type")
    return "".join(_part(part, f"{path}.{place}") for place, part in enumerate(value))


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise bad_request(f"{path}: only parts of type text are supported, not {kind!r}", path, "unsupported_content")
    if not isinstance(part.get("text"), str):
        raise bad_request(f"{path}.text must be a string", f"{path}.text", "invalid_type")
    for name in part:
        if name not in PART_KEYS:
            raise bad_request(f"{path}.{name} is not supported here", f"{path}.{name}", "unsupported_parameter")
    return _whole(part["text"], f"{path}.text")


def _whole(text: str, path: str) -> str:
    """A lone surrogate is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_request(f"{path} holds a lone surrogate", path, "invalid_value") from None
    return text
