"""Parameters, tools and content parts of other servers (vLLM, SGLang, llama.cpp, Ollama,
OpenRouter, DashScope), converted in lenient readings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs

from trouper.protocol.sampling import Sampling
from trouper.web.http.field_types import HUGE
from trouper.web.http.image_source import url_fields_of
from trouper.web.http.leniency import (
    Json,
    Skip,
    known_value,
    messages_adapted,
    put,
    renamed,
    safe_name,
)

# Stands for each part but text and images: an error would fail every later request of a
# conversation. The same for every image and turn: the prefix stays cached.
PLACEHOLDER = "[An image was sent here. This model reads text only.]"


LENGTHS = ("max_new_tokens", "n_predict", "num_predict", "max_gen_len", "max_tokens_to_sample")
SAMPLING = {
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
    "stop_sequence": "stop",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_words": "stop",
    "stopping_strings": "stop",
    "ban_eos_token": "ignore_eos",
    "min_new_tokens": "min_tokens",
}
STRUCTURES = {"regex": "guided_regex", "json_schema": "guided_json"}
BUDGETS = {
    "thinking_budget": "thinking_token_budget",
    "reasoning_budget": "thinking_token_budget",
    "max_thinking_tokens": "thinking_token_budget",
}
OPTIONS = frozenset(
    {
        "stop",
        "num_predict",
        "repeat_penalty",
        "num_ctx",
        *(field.name for field in attrs.fields(Sampling)),
    }
)
# Names whose loss would make an answer wrong.
NOT_SKIPPED = frozenset(
    {
        "grammar",
        "ebnf",
        "structural_tag",
        "format",
        "guided_decoding",
        "nvext",
        "grammar_string",
        "regex_pattern",
        "response_schema",
        "output_schema",
        "output_format",
        "stop_regex",
        "stop_conditions",
        "stop_tokens",
        "custom_stopping_strings",
        "allowed_token_ids",
        "allowed_tokens",
        "bad_words",
        "bad_words_ids",
        "banned_tokens",
        "banned_strings",
        "custom_token_bans",
        "suppress_tokens",
        "sequence_bias",
        "force_words_ids",
        "no_repeat_ngram_size",
        "logits_processors",
        "custom_logit_processor",
        "lora_path",
        "lora_request",
        "lora",
        "adapter_id",
        "chat_template",
        "template",
        "instruction_template",
        "prompt_template",
        "system",
        "system_prompt",
        "preamble",
        "documents",
        "suffix",
        "echo",
        "input_ids",
        "input_embeds",
        "prompt_embeds",
        "image_data",
        "audio_data",
        "video_data",
        "images",
        "image",
        "audio",
        "modalities",
        "functions",
        "function_call",
        "prompt_logprobs",
        "logprob_token_ids",
        "return_tokens_as_token_ids",
        "truncate_prompt_tokens",
        "truncate",
        "skip_special_tokens",
        "include_stop_str_in_output",
        "no_stop_trim",
        "use_beam_search",
        "return_hidden_states",
        "add_special_tokens",
    }
)
FORMATS = frozenset(
    {
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "json_schema",
        "regex",
    }
)
"""Names by which other dialects constrain an answer."""
STRICTEST = {"max": "xhigh"}


def length_aliases(target: str, *others: str) -> Mapping[str, str]:
    return dict.fromkeys((*LENGTHS, *others), target)


def sampling_adapted(
    value: Json, aliases: Mapping[str, str], lengths: Iterable[str], skip: Skip
) -> Json:
    value = renamed(_flat({**value}, skip), aliases, skip)
    for name in lengths:
        if type(value.get(name)) is int and value[name] < 0:
            value[name] = HUGE  # As many as the context holds.
    if value.get("seed") == -1:
        del value["seed"]  # A new seed each time, as in llama.cpp.
    _drop_empty_stops(value, skip)
    if value.get("stream") in (None, False) and value.pop("stream_options", None):
        skip("stream_options")
    budget = value.get("thinking_token_budget")
    if type(budget) is int and budget < 0:
        del value["thinking_token_budget"]
    return value


def _drop_empty_stops(value: Json, skip: Skip) -> None:
    """Forms send an empty field for no stop strings."""
    for name in ("stop", "stop_sequences"):
        given = value.get(name)
        if given == "" or (isinstance(given, list) and "" in given):
            value[name] = [stop for stop in given if stop != ""] or None
            skip(name)


def _flat(value: Json, skip: Skip) -> Json:
    """`extra_body` and Ollama's `options` rank below the other parameters."""
    for outer, names in (("extra_body", None), ("options", OPTIONS)):
        inner = value.pop(outer, None)
        if not isinstance(inner, dict):
            if inner is not None:
                skip(outer)
            continue
        for name, given in inner.items():
            if name in value or (names is not None and name not in names):
                skip(f"{outer}.{name}")
            else:
                value[name] = given
    return value


# -- reasoning -----------------------------------------------------------------------------------


def thinking_adapted(value: Json, skip: Skip) -> Json:
    """Convert to a template variable and a budget."""
    enabled = value.pop("enable_thinking", None)
    thinking = value.pop("thinking", None)
    if isinstance(thinking, dict):
        kind = thinking.get("type")
        thinking_kinds = {"disabled": False, "enabled": True, "adaptive": True, "auto": None}
        enabled = thinking_kinds.get(kind, enabled) if isinstance(kind, str) else enabled
        put(value, "thinking_token_budget", thinking.get("budget_tokens"), skip)
        for name in sorted(thinking.keys() - {"type", "budget_tokens"}):
            skip(f"thinking.{name}")
    elif isinstance(thinking, bool):
        enabled = thinking
    elif thinking is not None:
        skip("thinking")
    return with_thinking(value, enabled, skip)


def with_thinking(value: Json, enabled: object, skip: Skip) -> Json:
    """The request's own template variable wins."""
    if enabled is None:
        return value
    given = value.get("chat_template_kwargs")
    if not isinstance(enabled, bool) or not isinstance(given, dict | None):
        skip("enable_thinking")
        return value
    return value | {"chat_template_kwargs": {"enable_thinking": enabled} | (given or {})}


def reasoning_adapted(value: Json, efforts: Collection[str], skip: Skip) -> Json:
    """Convert OpenRouter's `reasoning` to an effort and a budget."""
    reasoning = value.pop("reasoning", None)
    if isinstance(reasoning, str):
        reasoning = {"effort": reasoning}
    if isinstance(reasoning, dict):
        put(value, "reasoning_effort", reasoning.get("effort"), skip)
        put(value, "thinking_token_budget", reasoning.get("max_tokens"), skip)
        value = _switched(value, reasoning.get("enabled"), skip)
        for name in sorted(reasoning.keys() - {"effort", "max_tokens", "enabled"}):
            skip(f"reasoning.{name}")
    elif reasoning is not None:
        skip("reasoning")
    effort = value.get("reasoning_effort")
    if isinstance(effort, str):
        value["reasoning_effort"] = STRICTEST.get(effort, effort)
    return known_value("reasoning_effort", efforts, value, skip)


def _switched(value: Json, enabled: object, skip: Skip) -> Json:
    if enabled is False:
        return value | {"reasoning_effort": "none"}
    return with_thinking(value, enabled, skip)


# -- structured output ---------------------------------------------------------------------------


def format_adapted(given: object, *, flat: bool) -> object:
    """llama.cpp has the schema beside the type, as the dialect has with `flat`."""
    if not isinstance(given, dict) or given.get("type") not in ("json_object", "json_schema"):
        return given
    schema, named = given.get("schema"), given.get("json_schema")
    if flat:
        if given["type"] == "json_object" and schema is None:
            return given
        return {"name": "answer"} | _schema_fields(given) | {"type": "json_schema"}
    if isinstance(named, dict):
        return given | {"json_schema": {"name": "answer"} | _schema_fields(named)}
    if schema is None or named is not None:
        return given
    rest = {name: inner for name, inner in given.items() if name not in ("schema", "json_schema")}
    return rest | {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _schema_fields(value: Json) -> Json:
    """`strict` may be text, as in LM Studio's documentation."""
    given = {name: inner for name, inner in value.items() if inner is not None}
    strict = given.get("strict")
    return given | {"strict": strict == "true"} if strict in ("true", "false") else given


CHOICES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


def tools_adapted(value: Json, known: Collection[str], skip: Skip) -> Json:
    """Skip other tools. If none remains, a choice that needs none is dropped."""
    tools = value.get("tools")
    if not isinstance(tools, list):
        return value
    kept = known_tools(tools, known, skip)
    if kept or not tools:
        return value | {"tools": kept}
    value = {name: given for name, given in value.items() if name != "tools"}
    if value.get("tool_choice") in ("auto", "none"):
        del value["tool_choice"]
    return value


def known_tools(tools: list[Any], known: Collection[str], skip: Skip) -> list[Any]:
    """Keep tools of the `known` types, and skip others. A function may lack the type."""
    kept: list[Any] = []
    for tool in tools:
        if not isinstance(tool, dict):
            kept.append(tool)
            continue
        kind = tool.get("type")
        looks_like_function = "function" in tool or "name" in tool or not tool
        if kind is None and looks_like_function:
            kept.append(tool | {"type": "function"})
        elif kind in known or not isinstance(kind, str | None):
            kept.append(tool)
        else:
            skip(f"tools.{safe_name(kind or next(iter(tool)))}")
    return kept


def choice_adapted(value: Json, *, nested: bool) -> Json:
    """`nested`: whether the dialect has the name within an object."""
    choice = value.get("tool_choice")
    if isinstance(choice, str):
        return value | {"tool_choice": CHOICES.get(choice, choice)}
    if not isinstance(choice, dict):
        return value
    kind, name = choice.get("type"), choice.get("name")
    if isinstance(kind, str) and kind in CHOICES:
        return value | {"tool_choice": CHOICES[kind]}
    if kind in (None, "tool"):
        kind = "function"
    if kind not in ("function", "custom"):
        return value
    inner = choice.get(kind)
    if name is None and isinstance(inner, dict):
        name = inner.get("name")
    if not isinstance(name, str):
        return value
    rest = {
        key: given
        for key, given in choice.items()
        if key not in ("type", "name", "function", "custom")
    }
    return value | {
        "tool_choice": rest
        | {"type": kind, **({kind: {"name": name}} if nested else {"name": name})}
    }


FILE = "[A file was sent here. This model cannot read it.]"
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Fields of the text, by type."""
IMAGES = ("image_url", "input_image", "image")
READ_ROLES = ("user", "tool", None)
"""None: the result of a call."""


PLACES = {
    "message": "content",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
}


@attrs.frozen
class PartTypes:
    known: Collection[str]
    """Types that messages of any role may have."""
    text: str
    image: str

    def image_part(self, part: Json) -> Json:
        """Return an image part of another dialect in this one's form."""
        fields = {name: value for name, value in url_fields_of(part).items() if value is not None}
        if self.image == "image_url":
            return {"type": self.image, "image_url": fields}
        return {"type": self.image} | {FLAT.get(name, name): fields[name] for name in fields}


FLAT = {"url": "image_url"}
CHAT = PartTypes(("text", "image_url"), "text", "image_url")
RESPONSES = PartTypes(
    ("input_text", "output_text", "refusal", "input_image"), "input_text", "input_image"
)
RESULTS = PartTypes(("input_text", "input_image"), "input_text", "input_image")


def parts_adapted(parts: Any, role: object, types: PartTypes, path: str, skip: Skip) -> Any:
    if not isinstance(parts, list) or all(_is_plain(part, types) for part in parts):
        return parts
    return [adapted for part in parts for adapted in _read(part, role, types, path, skip)]


def chat_adapted(value: Json, skip: Skip) -> Json:
    value = messages_adapted(value, lambda message: _message(message, skip))
    return tools_adapted(value, ("function", "custom"), skip)


def _message(message: Any, skip: Skip) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    adapted = parts_adapted(content, message.get("role"), CHAT, "messages.content", skip)
    return message if adapted is content else message | {"content": adapted}


def item_adapted(item: Any, skip: Skip) -> Any:
    name = PLACES.get(str(item.get("type"))) if isinstance(item, dict) else None
    if name is None or name not in item:
        return item
    role, types = (item.get("role"), RESPONSES) if name == "content" else (None, RESULTS)
    return item | {name: parts_adapted(item[name], role, types, f"input.{name}", skip)}


def _is_plain(part: Any, types: PartTypes) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return not isinstance(kind, str) or kind in types.known


def _read(part: Any, role: object, types: PartTypes, path: str, skip: Skip) -> list[Any]:
    if _is_plain(part, types):
        return [part]
    kind: str = part["type"]
    text = part.get(TEXTS[kind]) if kind in TEXTS else None
    if isinstance(text, str):
        return [{"type": types.text, "text": text}]
    if kind in IMAGES and role in READ_ROLES:
        return [types.image_part(part)]
    skip(f"{path}.{safe_name(kind)}")
    return [{"type": types.text, "text": FILE}] if role in READ_ROLES else []
