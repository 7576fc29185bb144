"""What the parameters of a request become, and what is counted of its answers: pure."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import ByteTokenizer
from tests.web.test_parsing import fault
from trouper.protocol.replies import Finished, TokenLogprobs
from trouper.protocol.requests import Generate, TextPrompt
from trouper.protocol.sampling import SamplingDefaults
from trouper.web.anthropic.messages import MessagesRequest, messages_to_generate
from trouper.web.http.field_types import MAX_STOP
from trouper.web.openai.completions import CompletionRequest, completion_to_generate, picked
from trouper.web.openai.openai_dialect import DONE, Envelope, Extras, OpenAiDialect, usage_body
from trouper.web.openai.parameters import (
    MAX_STOPS,
    Parameters,
    StreamOptions,
    choices_of,
    sampling_of,
    stream_options,
)
from trouper.web.output.dialect import Choice, Usage


def completion(**fields: Any) -> tuple[Generate, ...]:
    return completion_to_generate(
        CompletionRequest.parse({"prompt": "a", **fields}), "id", SamplingDefaults()
    )


@given(st.integers(-(2**70), 2**70))
def test_a_seed_counts_to_its_64th_bit(seed: int) -> None:
    [one] = completion(seed=seed)
    assert one.sampling.seed == seed % 2**64


def test_without_a_seed_each_prompt_draws_its_own_or_takes_the_servers() -> None:
    first, second = completion(prompt=["a", "b"])
    assert first.sampling.seed != second.sampling.seed
    given_by_server = completion_to_generate(
        CompletionRequest.parse({"prompt": ["a", "b"]}), "id", SamplingDefaults(7)
    )
    assert [one.sampling.seed for one in given_by_server] == [7, 7]
    assert [one.sampling.seed for one in completion(prompt="a", seed=0)] == [0]


OF_MODEL = SamplingDefaults(of_model=(("temperature", 0.6), ("top_k", 20)))


@pytest.mark.parametrize(
    ("body", "temperature", "top_k"),
    [({}, 0.6, 20), ({"temperature": 1, "top_k": 0}, 1, 0), ({"top_k": -1}, 0.6, 0)],
)
def test_the_models_own_sampling_is_the_default(
    body: dict[str, Any], temperature: float, top_k: int
) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    own = {name: max(value, 0) for name, value in body.items()}
    for generate in (
        *completion_to_generate(CompletionRequest.parse({"prompt": "a"} | body), "id", OF_MODEL),
        messages_to_generate(MessagesRequest.parse(chat | own), "id", OF_MODEL),
    ):
        sampling = generate.sampling
        assert (sampling.temperature, sampling.top_k, sampling.min_p) == (temperature, top_k, 0)


@given(st.integers(0, 2**64 - 1), st.integers(1, 128))
def test_choices_keep_the_first_seed_and_differ_in_the_others(seed: int, count: int) -> None:
    generate = Generate(
        request_id="r",
        prompt=TextPrompt("a"),
        sampling=sampling_of(Parameters(seed=seed), SamplingDefaults()),
    )
    choices = choices_of(generate, count)
    seeds = [one.sampling.seed for one in choices]
    assert seeds[0] == seed and len({*seeds}) == count and all(0 <= one < 2**64 for one in seeds)
    assert [one.request_id for one in choices] == [
        "r",
        *(f"r-{place}" for place in range(1, count)),
    ]


def test_each_parameter_becomes_its_own() -> None:
    told = {
        "temperature": 0.25,
        "top_p": 0.5,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.5,
        "frequency_penalty": 0.75,
        "seed": 3,
    }
    [one] = completion(
        **told,
        top_k=9,
        logit_bias={"7": 2, "0": -100},
        min_tokens=3,
        max_tokens=4,
        cache_salt="salt",
    )
    assert {name: getattr(one.sampling, name) for name in told} == told
    assert (one.sampling.top_k, one.sampling.logit_bias) == (9, ((7, 2.0), (0, -100.0)))
    assert (one.min_tokens, one.max_tokens, one.cache_salt) == (3, 4, "salt")


@pytest.mark.parametrize(("asked", "top_k"), [(-1, 0), (0, 0), (1, 1), (2**40, 2**30)])
def test_top_k_is_off_or_fits_an_int32(asked: int, top_k: int) -> None:
    assert completion(top_k=asked)[0].sampling.top_k == top_k


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"7": 100.5}}, "logit_bias.7"),
        ({"logit_bias": {"7": -101}}, "logit_bias.7"),
        ({"logit_bias": {"7": True}}, "logit_bias.7"),
        ({"logit_bias": {"07": 1}}, "logit_bias.07"),
        ({"logit_bias": {"٣": 1}}, "logit_bias.٣"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"stop": ["a"] * (MAX_STOPS + 1)}, "stop"),
        ({"stop": [1]}, "stop.0"),
        ({"stop": "a" * (MAX_STOP + 1)}, "stop"),
        ({"stop": ["b", "a" * (MAX_STOP + 1)]}, "stop.1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt.1"),
        ({"prompt": "\ud800"}, "prompt"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert fault(lambda: completion(**fields))[0] == param


def test_stops_are_strings_each_once() -> None:
    assert completion(stop="END")[0].stop == ("END",)
    assert completion(stop=["b", "a", "b"])[0].stop == ("b", "a")
    assert completion(stop=None)[0].stop == ()
    assert len(completion(stop=[str(n) for n in range(MAX_STOPS)])[0].stop) == MAX_STOPS
    assert completion(stop="a" * MAX_STOP)[0].stop == ("a" * MAX_STOP,)


def test_completions_are_16_tokens_long_as_openais() -> None:
    assert [one.max_tokens for one in (*completion(), *completion(max_tokens=None))] == [16, 16], (
        "null means absent"
    )


def test_prompts_of_one_request_have_ids_of_their_own() -> None:
    assert [one.request_id for one in completion(prompt=["a", "b"], n=2)] == [
        "id-0",
        "id-0-1",
        "id-1",
        "id-1-1",
    ]


def choice(text: str, *logprobs: float) -> Choice:
    seen = tuple(TokenLogprobs(97, logprob) for logprob in logprobs)
    return Choice(
        text, (97,) * len(seen), seen, Finished("stop", len(seen)), Usage(1, len(seen), 0), (1,)
    )


def test_the_best_are_those_of_the_highest_mean_of_each_prompt() -> None:
    """Not of the highest sum: that would be the shortest. In the order of their making."""
    own = [
        choice("worst", -3.0),
        choice("long", -0.2, -0.2, -0.2, -0.2),
        choice("short", -0.5),
        choice("best", -0.1),
    ]
    other = [choice("empty"), choice("x", -9.0), choice("y", -8.0), choice("z", -7.0)]
    request = CompletionRequest.parse({"prompt": ["a", "b"], "n": 2, "best_of": 4})
    assert [one.text for one in picked(request, [*own, *other])] == ["long", "best", "y", "z"]
    assert all(one.logprobs == () for one in picked(request, [*own, *other])), (
        "nobody asked for them"
    )
    assert picked(CompletionRequest.parse({"prompt": "a", "n": 4}), own) == own


def shape(**options: bool) -> OpenAiDialect:
    envelope = Envelope(id="i", created=1, model="m", fingerprint="f", tokenizer=ByteTokenizer())
    return OpenAiDialect("kind", envelope, Extras(StreamOptions(**options), False, 2))


def test_the_end_of_a_stream_tells_usage_if_it_was_asked_for() -> None:
    usages = [Usage(10, 3, 4), Usage(10, 5, 6), Usage(20, 7, 0), Usage(20, 9, 0)]
    assert shape().closing(usages) == DONE
    told, done, end = shape(include_usage=True).closing(usages).split(b"\n\n")
    assert (done + b"\n\n", end) == (DONE, b"")
    body = json.loads(told.removeprefix(b"data: "))
    assert body["choices"] == []
    assert body["usage"] == usage_body(Usage(30, 24, 4)), (
        "each prompt once, with what its first choice found cached"
    )
    assert body["usage"] == {
        "prompt_tokens": 30,
        "completion_tokens": 24,
        "total_tokens": 54,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_stream_options_need_a_stream() -> None:
    parameters = Parameters(stream=True, stream_options=StreamOptions(include_usage=True))
    assert stream_options(parameters) == StreamOptions(include_usage=True)
    assert fault(stream_options, Parameters(stream_options=StreamOptions())) == (
        "stream_options",
        "invalid_combination",
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"typical_p": -0.1}, "typical_p"),
        ({"xtc_probability": 1.1}, "xtc_probability"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"dry_allowed_length": 0}, "dry_allowed_length"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers.0"),
        ({"dry_sequence_breakers": ["a"] * 17}, "dry_sequence_breakers"),
    ],
)
def test_samplers_out_of_bounds_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert fault(lambda: completion(**fields))[0] == param
