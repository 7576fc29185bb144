"""Both ends of each documented range are taken, and names of other servers are named as sent."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.serving import Served, ask, exchange, get, post, serving
from trouper.protocol.sampling import Sampling

CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
MESSAGES_SENT = [{"role": "user", "content": "x"}]
MINIMAL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES_SENT, "max_tokens": 1},
    TEXT: {"prompt": "x", "max_tokens": 1},
    RESPONSES: {"input": "x", "max_output_tokens": 1},
    MESSAGES: {"messages": MESSAGES_SENT, "max_tokens": 1},
}
EVERYWHERE: list[dict[str, Any]] = [
    *({"temperature": value} for value in (0, 1e-9, 1, 2)),
    *({"top_p": value} for value in (0, 0.0, 1e-9, 1)),
    *({"top_k": value} for value in (-1, 0, 1, 2**31)),
    *({"min_p": value} for value in (0, 1)),
    *({"typical_p": value} for value in (0, 1)),
    *({"seed": value} for value in (-(2**63), -1, 0, 2**31, 2**63, 2**64)),
    *({"stop": value} for value in ([], None, "", [""], ["a", "b", "c", "d"], "a")),
    *({"priority": value} for value in (-(2**31), 0, 2**31 - 1)),
    {"ignore_eos": True, "min_tokens": 0},
    {"min_tokens": 1},
]
OF_OPENAI: list[dict[str, Any]] = [
    *({f"{kind}_penalty": value} for kind in ("presence", "frequency") for value in (-2, 2)),
    *({"repetition_penalty": value} for value in (0.01, 1, 100)),
    *({"logit_bias": value} for value in ({}, {"0": -100}, {"1": 100})),
    {"stop_token_ids": []},
]
OF_TEXT: list[dict[str, Any]] = [{"n": 1}, {"n": 2, "seed": 1}]
OF_ONE: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        *OF_TEXT,
        *({"logprobs": True, "top_logprobs": value} for value in (0, 20)),
        {"max_tokens": None, "max_completion_tokens": 1},
    ],
    TEXT: [*OF_TEXT, *({"logprobs": value} for value in (0, 20)), {"best_of": 1}],
    RESPONSES: [
        {"include": ["message.output_text.logprobs"], "top_logprobs": value} for value in (0, 20)
    ],
    MESSAGES: [{"max_tokens": 0}],
}


async def test_both_ends_of_a_range_are_taken() -> None:
    async with serving() as served:
        for path, minimal in MINIMAL.items():
            common = EVERYWHERE + (OF_OPENAI if path != MESSAGES else [])
            for more in (*common, *OF_ONE[path]):
                status, answer = await ask(served, minimal | more, path)
                assert status == 200, (path, more, answer)


BEYOND: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"logit_bias": {"0": 101}}, "logit_bias.0"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"n": 0}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"priority": 2**31}, "priority"),
    # As they were sent:
    ({"max_tokens": None, "n_predict": 0}, "n_predict"),
    ({"max_tokens": None, "max_new_tokens": "7"}, "max_new_tokens"),
    ({"max_tokens": None, "options": {"num_predict": "7"}}, "options.num_predict"),
    ({"repeat_penalty": -1}, "repeat_penalty"),
    ({"random_seed": "1"}, "random_seed"),
    ({"stop_sequences": [1]}, "stop_sequences.0"),
    ({"json_schema": 3}, "json_schema"),
    ({"regex": 3}, "regex"),
    ({"thinking_budget": "much"}, "thinking_budget"),
    ({"extra_body": {"regex": 3}}, "extra_body.regex"),
]


async def test_beyond_it_is_refused_by_the_name_that_was_sent() -> None:
    async with serving() as served:
        for more, param in BEYOND:
            status, answer = await ask(served, MINIMAL[CHAT] | more, CHAT)
            assert "error" in answer, more
            error = answer["error"]
            assert (status, error["param"]) == (400, param), (more, error)
            assert param.partition(".")[0] in error["message"], error


def test_of_no_likely_tokens_the_likeliest_is_left() -> None:
    assert Sampling(top_p=0).greedy and not Sampling(top_p=1e-9).greedy
    assert not Sampling(top_p=0, typical_p=0.5).greedy, "which may drop the likeliest"


CHANGES_AN_ANSWER = (
    "stop_regex",
    "stop_conditions",
    "stop_tokens",
    "banned_tokens",
    "banned_strings",
    "bad_words_ids",
    "suppress_tokens",
    "allowed_tokens",
    "no_repeat_ngram_size",
    "grammar_string",
    "guided_decoding",
    "nvext",
    "response_schema",
    "adapter_id",
    "system_prompt",
    "instruction_template",
    "sequence_bias",
    "truncate",
    "logprob_token_ids",
    "return_tokens_as_token_ids",
)


@pytest.mark.parametrize("path", MINIMAL)
async def test_names_that_change_an_answer_are_refused(path: str) -> None:
    async with serving() as served:
        for name in CHANGES_AN_ANSWER:
            status, answer = await ask(served, MINIMAL[path] | {name: ["x"]}, path)
            assert status == 400 and name in answer["error"]["message"], (name, answer)
            status, answer = await ask(served, MINIMAL[path] | {name: None}, path)
            assert status == 200, (name, answer)


async def stops(served: Served, more: dict[str, Any]) -> Any:
    _, answer = await ask(served, {"prompt": "abc", "max_tokens": 9, "ignore_eos": True} | more)
    return answer["choices"][0]["finish_reason"]


STOPS = (
    "stop",
    "stop_sequence",
    "stop_sequences",
    "stop_strings",
    "stop_words",
    "stopping_strings",
)


async def test_other_names_of_stops_and_lengths_work() -> None:
    async with serving() as served:
        _, answer = await ask(served, {"prompt": "abc", "max_tokens": 9, "ban_eos_token": True})
        first = answer["choices"][0]["text"][0]
        assert await stops(served, {}) == "length"
        for name in STOPS:
            assert await stops(served, {name: [first]}) == "stop", name
            assert await stops(served, {name: [first], "min_new_tokens": 9}) == "length", name


async def test_query_parameters_of_official_clients() -> None:
    """`?beta=true` of Anthropic's clients, `?api-version=` of Azure's, `include[]` of OpenAI's."""
    async with serving() as served:
        for query in ("beta=true", "api-version=2024-10-21"):
            for path, minimal in MINIMAL.items():
                assert (await ask(served, minimal, f"{path}?{query}"))[0] == 200
        _, made = await ask(served, MINIMAL[RESPONSES], RESPONSES)
        one = f"/v1/responses/{made['id']}"
        for path in (
            "/v1/models?limit=1000&after_id=x&beta=true",
            "/v1/files?purpose=batch&limit=2&order=asc&api-version=1",
            "/v1/batches?limit=2&api-version=1",
            f"{one}?include[]=message.output_text.logprobs&api-version=1",
            f"{one}/input_items?include[]=message.input_image.image_url&limit=1&order=asc",
        ):
            status, headers, _ = await exchange(served, get(path))
            assert status == 200, path
            named = headers.get("x-trouper-ignored", "")
            assert ("include" in named) == ("include" in path), (path, named)
        for path in (f"{one}/input_items?before=x", "/v1/files?before=x"):
            assert (await exchange(served, get(path)))[0] == 400, "another page"


async def test_probes() -> None:
    async with serving(api_key=("k",)) as served:
        for path in ("/", "/api/hello", "/health", "/livez"):
            head = get(path).replace(b"GET", b"HEAD", 1)
            status, _, body = await exchange(served, head)
            assert (status, body) == (200, b""), path


async def test_usage_is_null_until_the_last_chunk() -> None:
    for path in (CHAT, TEXT):
        async with serving() as served:
            body = MINIMAL[path] | {"stream": True, "stream_options": {"include_usage": True}}
            _, _, data = await exchange(served, post(path, body, "Connection: close\r\n"))
            assert data.count(b'"usage":null') == data.count(b'data: {"id"') - 1 > 0
            assert data.count(b'"usage":{') == 1
            _, _, data = await exchange(
                served, post(path, body | {"stream_options": None}, "Connection: close\r\n")
            )
            assert b'"usage"' not in data
