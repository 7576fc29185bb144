"""OpenAI's answers as JSON Schema."""

from __future__ import annotations

from trouper.web.http.request_schema import (
    COUNT,
    FLAG,
    NULL,
    NUMBER,
    TEXT,
    Json,
    array,
    either,
    full,
    nullable,
    ref,
    titled,
    with_properties,
)

TOKENS = array(COUNT)
REASON: Json = {"type": "string", "enum": ["stop", "length", "tool_calls"]}
MATCHED: Json = {
    "type": ["string", "integer", "null"],
    "description": "The stop string or token that ended the answer.",
}

USAGE = full(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": full({"cached_tokens": COUNT}),
        "completion_tokens_details": full({"reasoning_tokens": COUNT}),
    }
)

AT: Json = {
    "token": TEXT,
    "logprob": NUMBER,
    "bytes": nullable(array({"type": "integer", "minimum": 0, "maximum": 255})),
}
TOKEN_LOGPROBS = array(
    titled("ChatLogprob", full({**AT, "top_logprobs": array(titled("ChatTopLogprob", full(AT)))}))
)
CHAT_LOGPROBS = full({"content": TOKEN_LOGPROBS, "refusal": nullable(TOKEN_LOGPROBS)})
COMPLETION_LOGPROBS = full(
    {
        "tokens": array(TEXT),
        "token_logprobs": array(nullable(NUMBER)),
        "top_logprobs": array(nullable({"type": "object", "additionalProperties": NUMBER})),
        "text_offset": TOKENS,
    }
)

FUNCTION = full({"name": TEXT, "arguments": TEXT})
CALL: Json = {"id": TEXT, "type": {"const": "function"}, "function": FUNCTION}
CALL_PART = with_properties({"name": TEXT, "arguments": TEXT}, "arguments")
"""A call's first chunk has id, type and name; later chunks have arguments."""
MESSAGE = full(
    {
        "role": {"const": "assistant"},
        "content": nullable(TEXT),
        "refusal": nullable(TEXT),
        "reasoning_content": TEXT,
        "tool_calls": array(full(CALL)),
    },
    optional=("reasoning_content", "tool_calls"),
)
DELTA = with_properties(
    {
        "role": {"const": "assistant"},
        "content": TEXT,
        "refusal": nullable(TEXT),
        "reasoning_content": TEXT,
        "tool_calls": array(
            with_properties(CALL | {"index": COUNT, "function": CALL_PART}, "index", "function")
        ),
    }
)
CHAT_CHOICE = full(
    {
        "index": COUNT,
        "message": MESSAGE,
        "logprobs": either(ref("ChatLogprobs"), NULL),
        "finish_reason": REASON,
        "matched_stop": MATCHED,
        "token_ids": TOKENS,
    },
    optional=("token_ids",),
)
CHAT_CHUNK_CHOICE = full(
    {
        "index": COUNT,
        "delta": DELTA,
        "logprobs": either(ref("ChatLogprobs"), NULL),
        "finish_reason": nullable(REASON),
        "matched_stop": MATCHED,
        "token_ids": TOKENS,
    },
    optional=("matched_stop", "token_ids"),
)


def completion_choice(reason: Json, *required: str) -> Json:
    return full(
        {
            "index": COUNT,
            "text": TEXT,
            "logprobs": either(ref("CompletionLogprobs"), NULL),
            "finish_reason": reason,
            "matched_stop": MATCHED,
            "token_ids": TOKENS,
            "prompt_token_ids": TOKENS,
        },
        optional={"matched_stop", "token_ids", "prompt_token_ids"} - {*required},
    )


def _around(kind: str, choice: Json, *required: str, **more: Json) -> Json:
    shared: Json = {
        "id": TEXT,
        "object": {"const": kind},
        "created": COUNT,
        "model": TEXT,
        "system_fingerprint": TEXT,
        "choices": array(choice),
    }
    usage = ref("Usage") if "usage" in required else nullable(ref("Usage"))
    return with_properties({**shared, "usage": usage, **more}, *shared, *required)


INPUTS = array({"enum": ["text", "image"]})
SOMETIMES: Json = {
    "parent": TEXT,
    "root": TEXT,
    "rank": COUNT,
    "max_model_len": COUNT,
    "max_input_tokens": COUNT,
    "max_tokens": COUNT,
    "tool_calls": FLAG,
    "input_modalities": INPUTS,
    "architecture": full({"input_modalities": INPUTS, "output_modalities": array(TEXT)}),
    "weights_bytes": COUNT,
    "kind": {"enum": ["generator", "embedder", "reranker"]},
    "quantization": TEXT,
    "fits": FLAG,
    "problem": TEXT,
}
"""Fields of an adapter, of a loaded model, or of known files."""
MODEL_BODY = full(
    {
        "id": TEXT,
        "object": {"const": "model"},
        "created": COUNT,
        "owned_by": TEXT,
        **SOMETIMES,
        "loaded": FLAG,
        "state": {"enum": ["unloaded", "asleep", "waiting", "loading", "ready", "unloading"]},
        "pinned": FLAG,
        "ttl_s": NUMBER,
        "type": {"const": "model"},
        "display_name": TEXT,
        "created_at": TEXT | {"format": "date-time"},
        "lifecycle": {"const": "active"},
    },
    optional=SOMETIMES,
)
MODELS = full(
    {
        "object": {"const": "list"},
        "data": array(ref("ModelBody")),
        "has_more": FLAG,
        "first_id": nullable(TEXT),
        "last_id": nullable(TEXT),
    }
)
TOKENIZED = full(
    {
        "count": COUNT,
        "max_model_len": COUNT,
        "tokens": TOKENS,
        "token_strs": nullable(array(TEXT)),
    }
)
DETOKENIZED = full({"prompt": TEXT})

COMPONENTS: Json = {
    "ChatLogprobs": CHAT_LOGPROBS,
    "CompletionLogprobs": COMPLETION_LOGPROBS,
    "Usage": USAGE,
    "ChatCompletion": _around("chat.completion", CHAT_CHOICE, "usage", prompt_token_ids=TOKENS),
    "ChatCompletionChunk": _around(
        "chat.completion.chunk", CHAT_CHUNK_CHOICE, prompt_token_ids=TOKENS
    ),
    "Completion": _around("text_completion", completion_choice(REASON, "matched_stop"), "usage"),
    "CompletionChunk": _around("text_completion", completion_choice(nullable(REASON))),
    "ModelBody": MODEL_BODY,
}
