"""What clients send is read past, and never silently: header, metric and log name it. What would be
a wrong answer is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.fakes import EOS, FakeEngine
from tests.family_configs import LONG
from tests.schemathesis import generated_here
from tests.web.scraping import scrape
from tests.web.serving import ask, exchange, get, post, serving
from tests.web.test_openapi import described, request_of, validator
from trouper.web.anthropic import messages
from trouper.web.http.leniency import MAX_NAMES, MORE, ReadPast
from trouper.web.http.request_body import Body
from trouper.web.observability.request_log import MAX_SERIES, OTHER, IgnoredNames
from trouper.web.openai import chat_completions, completions, embeddings
from trouper.web.responses import response_request as responses

Json = dict[str, Any]
CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
HEADER, METRIC = "x-trouper-ignored", "trouper_ignored_parameters_total"
SAID: list[Json] = [{"role": "user", "content": "x"}]
LEAST: dict[str, Json] = {
    CHAT: {"messages": SAID, "max_tokens": 2},
    TEXT: {"prompt": "x", "max_tokens": 2},
    RESPONSES: {"input": "x", "max_output_tokens": 2},
    MESSAGES: {"messages": SAID, "max_tokens": 2},
    "/v1/embeddings": {"input": "x"},
}
CLASSES: dict[str, type[Body]] = {
    CHAT: chat_completions.ChatRequest,
    TEXT: completions.CompletionRequest,
    RESPONSES: responses.ResponseRequest,
    MESSAGES: messages.MessagesRequest,
    "/v1/embeddings": embeddings.EmbeddingRequest,
}
SENT = (
    "usage",
    "provider",
    "cache_prompt",
    "keep_alive",
    "dynatemp_range",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "tfs_z",
    "repeat_last_n",
    "num_ctx",
    "num_gpu",
    "id_slot",
    "n_keep",
    "transforms",
    "models",
    "route",
    "plugins",
    "session_id",
    "include_reasoning",
    "samplers",
    "guided_decoding_backend",
    "mm_processor_kwargs",
    "request_id",
    "rid",
    "timings_per_token",
    "draft_model",
    "ttl",
    "made_up",
)
"""Parameters of other servers that clients send to all."""
ODD = {"an": "odd value"}
"""Requests something, of whatever it is sent for."""
CALL: Json = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL: Json = {"type": "function", "function": {"name": "f"}}
ANSWER: Json = {"role": "assistant", "content": "y"}


def told(**more: Any) -> Json:
    return {"messages": [*SAID, ANSWER | more, *SAID]}


def skipped(path: str) -> list[str]:
    """The unsupported parameters that a request is read past."""
    kind = CLASSES[path]
    return [name for name in kind.unsupported if kind.may_skip(name)]


TOP: list[tuple[str, Json, str]] = [
    (path, {name: ODD}, name)
    for path in CLASSES
    for name in (*skipped(path), *SENT)
    if name not in ("stop", "seed")
]
INNER: list[tuple[str, Json, str]] = [
    *(
        (CHAT, told(**{key: ODD}), f"messages.{key}")
        for key in (
            "reasoning_details",
            "thinking_blocks",
            "provider_specific_fields",
            "id",
            "cache_control",
            "extra_content",
            "refusal",
        )
    ),
    (CHAT, told(tool_calls=[CALL | {"extra_content": ODD}]), "messages.tool_calls.extra_content"),
    (
        CHAT,
        told(tool_calls=[CALL | {"function": {"name": "f", "arguments": "{"}}]),
        "messages.tool_calls.function.arguments",
    ),
    (CHAT, {"tools": [TOOL | {"strict": True}], "tool_choice": "none"}, "tools.strict"),
    (CHAT, {"reasoning": {"effort": "low", "exclude": True}}, "reasoning.exclude"),
    (CHAT, {"thinking": {"type": "enabled", "level": 3}}, "thinking.level"),
    (CHAT, {"options": {"num_gpu": 1}}, "options.num_gpu"),
    (CHAT, {"extra_body": {"made_up": 1}}, "made_up"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (
        CHAT,
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    (CHAT, {"max_tokens": 10**6}, "max_tokens"),
    (CHAT, {"n_predict": 3}, "n_predict"),
    (TEXT, {"max_tokens": 10**6}, "max_tokens"),
    (RESPONSES, {"max_output_tokens": 10**6}, "max_tokens"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (RESPONSES, {"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    (CHAT, {"reasoning_effort": "utmost"}, "reasoning_effort"),
    (CHAT, {"reasoning": {"effort": "utmost"}}, "reasoning_effort"),
    (RESPONSES, {"reasoning": {"effort": "utmost"}}, "reasoning.effort"),
    (MESSAGES, {"output_config": {"effort": "utmost"}}, "output_config.effort"),
    (
        MESSAGES,
        {"max_tokens": 2, "thinking": {"type": "adaptive", "display": "updates"}},
        "thinking.display",
    ),
    (RESPONSES, {"input": [{"type": "message", "status": "searching", **SAID[0]}]}, "input.status"),
    (
        RESPONSES,
        {"input": [{"type": "reasoning", "encrypted_content": "x"}, *SAID]},
        "input.encrypted_content",
    ),
    *(
        (RESPONSES, {"input": [{"role": "user", "content": "x", "id": item_id}]}, "input.id")
        for item_id in ("", "x" * 129, 5)
    ),
    (RESPONSES, {"input": [{"type": "reasoning", "content": [ODD]}, ANSWER]}, "input.content"),
    (
        RESPONSES,
        {
            "input": [
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"},
                *SAID,
            ]
        },
        "input.arguments",
    ),
    (MESSAGES, {"temperature": 1.5}, "temperature"),
    (
        MESSAGES,
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits",
    ),
    (
        MESSAGES,
        {
            "tools": [{"name": "f", "input_schema": {}, "input_examples": [{}]}],
            "tool_choice": {"type": "none"},
        },
        "tools.input_examples",
    ),
    (MESSAGES, {"output_config": {"task_budget": ODD}}, "output_config.task_budget"),
    (MESSAGES, {"system": [{"type": "text", "text": "x", "citations": [1]}]}, "system.citations"),
]


async def test_each_name_is_in_header_metric_and_log(caplog: pytest.LogCaptureFixture) -> None:
    """Answered with 200, and each time the same thing is named and nothing else; logged for the
    first time only."""
    caplog.set_level(logging.INFO, "trouper.web")
    expected: dict[str, int] = {}
    # The answer that is as long as the context ends at once, and embeddings need no answer.
    engine = FakeEngine(token_at=lambda _, position: 97 if position < 4 else EOS)
    async with serving(engine, {"max_kv_size": 256}) as served:
        for path, more, name in (*TOP, *INNER):
            status, headers, body = await exchange(served, post(path, LEAST[path] | more))
            assert (status, headers.get(HEADER)) == (200, name), (path, more, body)
            expected[name] = expected.get(name, 0) + 1
        seen = await scrape(served)
    assert {name: seen.samples[METRIC, (("name", name),)] for name in expected} == expected
    lines = [
        record.getMessage() for record in caplog.records if "is read past" in record.getMessage()
    ]
    for name in expected:
        assert sum(f" {name!r} is read past" in line for line in lines) == 1, name
    assert len(lines) == len(expected)


async def test_strict_refuses_the_same() -> None:
    """By name, in whichever form it was sent; and what is served as it should be is served."""
    async with serving(FakeEngine(), {"max_kv_size": 256}, strict=True) as served:
        for path, more, _ in (*TOP, *INNER):
            status, headers, body = await exchange(served, post(path, LEAST[path] | more))
            assert (status, HEADER in headers) == (400, False), (path, more, body)
        for path, body_ in LEAST.items():
            assert (await exchange(served, post(path, body_)))[0] == 200
        seen = await scrape(served)
    assert seen.values(METRIC) == []


async def test_a_stream_names_it_before_its_first_event() -> None:
    async with serving(FakeEngine()) as served:
        for path in (CHAT, TEXT, RESPONSES, MESSAGES):
            body = LEAST[path] | {"stream": True, "made_up": 1, "mirostat": 2}
            status, headers, answer = await exchange(served, post(path, body))
            assert (status, headers[HEADER]) == (200, "made_up, mirostat")
            assert headers["content-type"].startswith("text/event-stream") and b"data: " in answer


async def test_a_refusal_names_what_was_read_past_before_it() -> None:
    async with serving(FakeEngine()) as served:
        status, headers, _ = await exchange(
            served, post(CHAT, LEAST[CHAT] | {"made_up": 1, "temperature": 5})
        )
    assert (status, headers[HEADER]) == (400, "made_up")


REFUSED: list[tuple[str, Json, str]] = [
    *(
        (path, {name: "x"}, name)
        for path in (CHAT, TEXT, RESPONSES, MESSAGES)
        for name in (
            "grammar",
            "ebnf",
            "structural_tag",
            "format",
            "documents",
            "chat_template",
            "lora_path",
            "allowed_token_ids",
            "bad_words",
            "images",
            "functions",
            "prompt_logprobs",
        )
    ),
    (CHAT, {"audio": ODD}, "audio"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    (CHAT, told(function_call={"name": "f"}), "messages.1.function_call"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["x"]}]}, "messages.0.images"),
    (CHAT, {"skip_special_tokens": False}, "skip_special_tokens"),
    (CHAT, {"extra_body": {"grammar": "x"}}, "extra_body.grammar"),
    (CHAT, {"temperature": 3}, "temperature"),
    (CHAT, {"enable_thinking": True, "max_tokens": 0}, "max_tokens"),
    (TEXT, {"suffix": "x"}, "suffix"),
    (TEXT, {"use_beam_search": True}, "use_beam_search"),
    (RESPONSES, {"conversation": "x"}, "conversation"),
    (RESPONSES, {"response_format": {"type": "json_object"}}, "response_format"),
    (MESSAGES, {"response_format": {"type": "json_object"}}, "response_format"),
    ("/v1/embeddings", {"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"embed_dtype": "float16"}, "embed_dtype"),
    ("/v1/embeddings", {"endianness": "big"}, "endianness"),
    ("/v1/embeddings", {"use_activation": False}, "use_activation"),
    ("/v1/embeddings", {"normalize": False}, "normalize"),
]


async def test_what_would_be_a_wrong_answer_is_refused_by_name() -> None:
    async with serving(FakeEngine()) as served:
        for path, more, param in REFUSED:
            status, answer = await ask(served, LEAST[path] | more, path)
            error = answer["error"]
            assert (status, error.get("param", param)) == (400, param), (path, more, error)
            assert param in error["message"], (path, error)


async def test_what_requests_nothing_is_not_named_or_only_named() -> None:
    """A null is absent, whatever it is of; a neutral value of a parameter that is refused is
    taken."""
    async with serving(FakeEngine()) as served:
        for more, named in (
            ({"made_up": None}, None),
            ({"grammar": None}, None),
            ({"functions": []}, None),
            ({"grammar": ""}, "grammar"),
            ({"service_tier": "auto"}, None),
        ):
            status, headers, _ = await exchange(served, post(CHAT, LEAST[CHAT] | more))
            assert (status, headers.get(HEADER)) == (200, named), more


# -- bounds --------------------------------------------------------------------------------------


async def test_names_cannot_leave_their_header_or_fill_it() -> None:
    odd = {"a\r\nSet-Cookie: x=1": 1, "b, c": 1, "é😀": 1, "x" * 500: 1, "": 1}
    async with serving(FakeEngine()) as served:
        _, headers, _ = await exchange(served, post(CHAT, LEAST[CHAT] | odd))
        names = headers[HEADER].split(", ")
        assert names[:3] == ["a%0d%0aset-cookie:%20x%3d1", "b%2c%20c", "%c3%a9%f0%9f%98%80"]
        assert names[3] == "x" * 80 and "set-cookie" not in headers
        many = {f"made_up_{number}": 1 for number in range(5000)}
        _, headers, _ = await exchange(served, post(CHAT, LEAST[CHAT] | many))
        names = headers[HEADER].split(", ")
        assert (len(names), names[-1]) == (MAX_NAMES + 1, MORE)


def test_series_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trouper.web")
    ignored = IgnoredNames()
    for number in range(3 * MAX_SERIES):
        past = ReadPast()
        past.skip(f"name_{number}")
        ignored.note(past.take_new(), "/x")
        assert past.take_new() == []
    assert len(ignored.counts) == len(caplog.records) + 1 == MAX_SERIES + 1
    assert ignored.counts[OTHER] == 2 * MAX_SERIES


async def test_a_query_is_read_past_too() -> None:
    """But for one that chooses what is in the answer."""
    async with serving(FakeEngine()) as served:
        _, made = await ask(served, LEAST[RESPONSES], RESPONSES)
        one = f"{RESPONSES}/{made['id']}"
        status, headers, _ = await exchange(
            served, get(f"{one}?include_obfuscation=true&include=x")
        )
        assert (status, headers[HEADER]) == (200, "include, include_obfuscation")
        assert (await exchange(served, get(f"{one}/input_items?before=x")))[0] == 400
        status, headers, _ = await exchange(served, get("/v1/live?made_up=1"))
        assert (status, headers[HEADER]) == (200, "made_up")
        assert (await scrape(served)).samples[METRIC, (("name", "made_up"),)] == 1
    async with serving(FakeEngine(), strict=True) as served:
        assert (await exchange(served, get("/v1/live?made_up=1")))[0] == 400


async def test_openapi_describes_what_is_read_past() -> None:
    for strict in (False, True):
        async with serving(FakeEngine(), strict=strict) as served:
            document = await described(served)
        schema = request_of(document, CHAT)
        assert schema["additionalProperties"] is not strict
        assert ("n_predict" in schema["properties"]) is not strict
        assert "grammar" not in schema["properties"]
        against = validator(document, schema)
        body = {"messages": [{"role": "user", "content": "x"}]}
        assert against.is_valid(body | {"grammar": ""}) is not strict
        assert not against.is_valid(body | {"grammar": "x"})
        verbosity = validator(document, schema["properties"]["verbosity"])
        assert verbosity.is_valid(None) and verbosity.is_valid(ODD) is not strict


@pytest.mark.long
async def test_valid_bodies_are_answered_as_described() -> None:
    """Of invalid ones, some are read past: what is made of the strict document is refused in its
    own test. Schemathesis cannot make responses: an object that may hold more, of which one of two
    names is needed, is beyond its generator."""
    flags = [
        "--max-examples",
        "5" if LONG else "1",
        "--seed",
        "1",
        "--phases",
        "examples,fuzzing",
        "--mode",
        "positive",
    ]
    without = [f"--exclude-path={path}" for path in (RESPONSES, f"{RESPONSES}/input_tokens")]
    result = await generated_here(*flags, *without, strict=False)
    shown = result.stdout.decode()
    assert result.returncode == 0, shown
    assert "Fuzzing" in shown
