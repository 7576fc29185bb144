"""Parameters in the names and forms of other servers, as lenient readings understand them: pure."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.test_parsing import fault
from trouper.protocol.requests import ChatPrompt, Generate
from trouper.protocol.sampling import SamplingDefaults
from trouper.web.anthropic.messages import MessagesRequest, messages_to_generate
from trouper.web.http.field_types import HUGE
from trouper.web.http.leniency import ReadPast
from trouper.web.openai.chat_completions import ChatRequest, chat_to_generate
from trouper.web.openai.completions import CompletionRequest, completion_to_generate
from trouper.web.responses.items import items_of, messages_of
from trouper.web.responses.response_request import parse_response, response_to_generate

Json = dict[str, Any]
SAID: list[Json] = [{"role": "user", "content": "x"}]


def chat(body: Json) -> tuple[Generate, list[str]]:
    past = ReadPast()
    [generate, *_] = chat_to_generate(
        ChatRequest.parse({"messages": SAID, **body}, past), "id", SamplingDefaults(1)
    )
    return generate, [*past.names]


def completion(body: Json) -> tuple[Generate, list[str]]:
    past = ReadPast()
    [generate] = completion_to_generate(
        CompletionRequest.parse({"prompt": "x", **body}, past), "id", SamplingDefaults(1)
    )
    return generate, [*past.names]


def response(body: Json) -> tuple[Generate, list[str]]:
    past = ReadPast()
    resolved = parse_response({"input": "x", **body}, past)
    items = items_of(resolved.request.input or "", {})
    return response_to_generate(resolved, messages_of(None, items), "id", SamplingDefaults(1)), [
        *past.names
    ]


def message(body: Json) -> tuple[Generate, list[str]]:
    past = ReadPast()
    return messages_to_generate(
        MessagesRequest.parse({"messages": SAID, "max_tokens": 9, **body}, past),
        "id",
        SamplingDefaults(1),
    ), [*past.names]


def variables(generate: Generate) -> Json:
    assert isinstance(generate.prompt, ChatPrompt)
    return {**generate.prompt.template_kwargs}


READERS = {"chat": chat, "completion": completion, "response": response}
LENGTHS = ("max_new_tokens", "n_predict", "num_predict", "max_tokens_to_sample", "max_gen_len")


@pytest.mark.parametrize("kind", READERS)
def test_names_of_other_servers_mean_ours(kind: str) -> None:
    read = READERS[kind]
    for name in LENGTHS:
        generate, ignored = read({name: 7})
        assert (generate.max_tokens, ignored) == (7, []), name
    generate, ignored = read({"repeat_penalty": 1.5, "random_seed": 5, "stop_sequences": ["a"]})
    assert (generate.sampling.repetition_penalty, generate.sampling.seed, generate.stop) == (
        1.5,
        5,
        ("a",),
    )
    generate, ignored = read({"options": {"temperature": 0.5, "num_predict": 3, "top_k": 4}})
    assert (
        generate.sampling.temperature,
        generate.max_tokens,
        generate.sampling.top_k,
        ignored,
    ) == (0.5, 3, 4, [])
    assert read({"extra_body": {"min_p": 0.25}})[0].sampling.min_p == 0.25


def test_each_dialects_length_is_anothers_alias() -> None:
    assert chat({"max_output_tokens": 3})[0].max_tokens == 3
    assert completion({"max_completion_tokens": 3})[0].max_tokens == 3
    assert (
        response({"max_tokens": 3})[0].max_tokens
        == response({"max_completion_tokens": 3})[0].max_tokens
        == 3
    )
    assert message({"max_tokens": None, "max_completion_tokens": 3})[0].max_tokens == 3
    assert message({"stop": "a"})[0].stop == ("a",)


def test_an_alias_beside_its_own_name_loses_and_is_named() -> None:
    generate, ignored = chat(
        {"max_tokens": 3, "n_predict": 4, "repeat_penalty": 1.5, "repetition_penalty": 1.5}
    )
    assert (generate.max_tokens, ignored) == (3, ["n_predict"])
    generate, ignored = chat(
        {"temperature": 0.5, "options": {"temperature": 1, "num_gpu": 3}, "extra_body": 3}
    )
    assert generate.sampling.temperature == 0.5
    assert sorted(ignored) == ["extra_body", "options.num_gpu", "options.temperature"]


def test_a_length_of_minus_one_is_what_the_context_holds() -> None:
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        assert chat({name: -1})[0].max_tokens == HUGE
    assert completion({"max_tokens": -1})[0].max_tokens == HUGE
    assert response({"max_output_tokens": -1})[0].max_tokens == HUGE
    assert fault(lambda: chat({"max_tokens": 0}))[0] == "max_tokens"


@pytest.mark.parametrize(
    ("body", "expected", "budget"),
    [
        ({"enable_thinking": True}, {"enable_thinking": True}, None),
        ({"enable_thinking": False}, {"enable_thinking": False}, None),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
            None,
        ),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True}, 9),
        ({"thinking": True}, {"enable_thinking": True}, None),
        ({"thinking_budget": 5}, {}, 5),
        ({"reasoning_budget": -1}, {}, None),
        ({"reasoning_budget": 0}, {"enable_thinking": False}, 0),
    ],
)
@pytest.mark.parametrize("kind", ["chat", "response"])
def test_thinking(kind: str, body: Json, expected: Json, budget: int | None) -> None:
    generate, ignored = READERS[kind](body)
    assert (variables(generate), generate.thinking_token_budget, ignored) == (expected, budget, [])


@pytest.mark.parametrize("kind", ["chat", "response"])
def test_reasoning(kind: str) -> None:
    read = READERS[kind]
    generate, ignored = read({"reasoning": {"effort": "low", "max_tokens": 9}})
    assert variables(generate) == {"enable_thinking": True, "reasoning_effort": "low"}
    assert (generate.thinking_token_budget, ignored) == (9, [])
    assert variables(read({"reasoning": {"enabled": False}})[0]) == {"enable_thinking": False}
    assert variables(read({"reasoning_effort": "high"})[0])["reasoning_effort"] == "high"
    generate, ignored = read({"reasoning_effort": "extreme"})
    assert variables(generate) == {} and ignored in (["reasoning_effort"], ["reasoning.effort"])


@pytest.mark.parametrize("read", [chat, completion, response])
def test_a_seed_of_minus_one_is_a_new_one_each_time(read: Any) -> None:
    """As llama.cpp and vLLM have it: programs send it where their users have set none."""
    assert read({"seed": -1})[0].sampling.seed == read({})[0].sampling.seed
    assert read({"seed": -2})[0].sampling.seed % 2**64 == 2**64 - 2


def test_the_highest_effort_is_the_highest_there_is() -> None:
    assert variables(chat({"reasoning_effort": "max"})[0])["reasoning_effort"] == "xhigh"
    assert variables(message({"enable_thinking": True})[0]) == {"enable_thinking": True}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "given",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        {
            "type": "json_schema",
            "json_schema": {"name": "joke_response", "strict": "true", "schema": SCHEMA},
        },
    ],
)
@pytest.mark.parametrize("read", [chat, completion])
def test_a_schema_is_followed_wherever_it_stands(read: Any, given: Json) -> None:
    """It would be a wrong answer without it."""
    plain = read(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
    )[0].grammar
    found, ignored = read({"response_format": given})
    assert plain is not None and found.grammar is not None
    assert (found.grammar.source, ignored) == (plain.source, [])


def test_a_schema_without_a_name_in_responses() -> None:
    for given in (
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA, "name": "n", "strict": "false"},
        {"type": "json_object", "schema": SCHEMA},
    ):
        grammar = response({"text": {"format": given}})[0].grammar
        assert grammar is not None and grammar.kind == "json_schema"
    plain = response({"text": {"format": {"type": "json_object"}}})[0].grammar
    assert plain is not None and plain.kind == "json_object"


def test_sglangs_constraints_are_constraints() -> None:
    for more, kind in (({"regex": "a+"}, "regex"), ({"json_schema": SCHEMA}, "json_schema")):
        grammar = chat(more)[0].grammar
        assert grammar is not None and grammar.kind == kind


def spoken(answer: Json) -> Json:
    generate, _ = chat({"messages": [*SAID, {"role": "assistant", **answer}, *SAID]})
    assert isinstance(generate.prompt, ChatPrompt)
    return {**generate.prompt.messages[1]}


def test_answers_as_clients_send_them_back() -> None:
    assert spoken({"content": None})["content"] == ""
    assert spoken({"content": None, "refusal": "No."})["content"] == "No."
    assert spoken({"content": "a", "reasoning": "hm"})["reasoning_content"] == "hm"
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": '}}
    assert spoken({"tool_calls": [call]})["tool_calls"][0]["function"]["arguments"] == {
        "arguments": '{"a": '
    }
    generate, _ = chat({"messages": [*SAID, {"role": "tool", "content": None}, *SAID]})
    assert isinstance(generate.prompt, ChatPrompt)
    assert generate.prompt.messages[1]["content"] == ""
    broken = {"id": "1", "function": {"name": "f", "arguments": "\ud800{"}}
    assert fault(lambda: spoken({"tool_calls": [broken]}))[0] is not None


def test_a_strict_reading_knows_no_other_servers() -> None:
    for name, value in {
        "n_predict": 3,
        "enable_thinking": True,
        "options": {},
        "reasoning": {},
    }.items():
        assert (
            fault(
                lambda name=name, value=value: ChatRequest.parse({"messages": SAID, name: value})
            )[0]
            == name
        )


FURTHER: Json = {
    "typical_p": 0.5,
    "xtc_probability": 0.25,
    "xtc_threshold": 0.2,
    "dry_multiplier": 0.75,
    "dry_base": 2,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", "User:", "\n"],
}


@pytest.mark.parametrize("kind", [*READERS, "messages"])
@pytest.mark.parametrize(
    "given", [FURTHER, {"options": FURTHER}], ids=["named", "Ollama's options"]
)
def test_llama_cpps_samplers(kind: str, given: Json) -> None:
    if kind == "messages":
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **given}
        sampling = messages_to_generate(
            MessagesRequest.parse(body, ReadPast()), "id", SamplingDefaults()
        ).sampling
    else:
        generate, ignored = READERS[kind](given)
        sampling = generate.sampling
        assert ignored == [] and not READERS[kind]({})[0].sampling.dry
    read = {name: getattr(sampling, name) for name in FURTHER}
    assert read == FURTHER | {"dry_sequence_breakers": ("\n", "User:")}
    assert sampling.dry
