"""A stream and a whole answer of the same seed say the same: text, calls, log-probabilities, token
ids, usage.

Random requests of every kind through HTTP, some at a time, on a tiny random model that has learnt
to think and to call: grammars make it do so.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from tokenizers import pre_tokenizers

from tests.families import save, write_json
from tests.real.wishes import SCHEMA, TOOL
from tests.web.serving import Served, ask
from tests.web.streams import Json, joined, joined_chat, stream
from trouper import Runtime, ServerSettings, Settings, run_runtime
from trouper.engine.host import MlxEngine
from trouper.web.server import serve_http

REQUESTS = 400 if os.environ.get("TROUPER_LONG_TESTS") else 100
AT_A_TIME = 6
CLOSE = 5e-4
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
THINKING = ("<think>", "</think>")


def save_with_markers(directory: Path) -> Path:
    """Its last two pairs of letters are the markers of thinking, and calls are read as JSON."""
    save("llama", directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    lost = dict(zip((509, 510), THINKING, strict=True))
    tokenizer["model"]["vocab"] = {
        piece: token for piece, token in vocabulary.items() if token not in lost
    }
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = [
        pair for pair in merges if vocabulary["".join(pair)] not in lost
    ]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"] += [
        {"id": token, "content": text, **plain} for token, text in lost.items()
    ]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(directory / "tokenizer_config.json", config | {"tool_parser_type": "json_tools"})
    return directory


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Served]:
    shutdown = trio.Event()
    settings = Settings(model=str(path), no_ssd=True, gather_ms=0, block_size=16)
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(
            partial(run_runtime, settings, engine=MlxEngine(settings))
        )
        [url] = await nursery.start(
            partial(serve_http, runtime, ServerSettings(port=0), shutdown=shutdown)
        )
        yield Served(int(url.rsplit(":", 1)[1]), runtime, None, shutdown)  # type: ignore[arg-type]
        await runtime.drain(5)
        shutdown.set()


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
NO_BLANKS = {str(ALPHABET.index(blank)): -100 for blank in "ĠĊčĉ"}
"""Between the tokens of JSON noise is mostly blanks."""
CALL = (
    r"<tool_call>\{\"name\": \"weigh\", \"arguments\": \{\"grams\": [1-9]\}\}</tool_call>".replace(
        '\\"', '"'
    )
)
STRUCTURES: tuple[Json, ...] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "cat", "schema": SCHEMA}}},
    {"guided_regex": "[a-f]{3}-[0-9]{2,4}"},
    {"guided_choice": ["yes", "no", "maybe not"]},
    {"guided_grammar": 'start: "<" /[a-zé]{1,5}/ ">"'},
)
SPOKEN: tuple[Json, ...] = (
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weigh"}}},
    {"tools": [TOOL], "guided_regex": f"[a-z ]{{0,4}}({CALL}[a-z ]{{0,4}}){{2,3}}"},
    {"tools": [TOOL], "guided_regex": f"({CALL}){{2}}", "parallel_tool_calls": False},
    {"tools": [TOOL], "guided_regex": "[a-z]{0,3}<tool_call>no call[a-z]{0,3}(</tool_call>)?"},
    {"tools": [TOOL], "guided_regex": f"<think>[a-z ]{{1,9}}</think>\n?(fine|{CALL})"},
    {"guided_regex": "<think>\n?[a-z]{1,9}(</think>[a-z]{0,5})?"},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "none"},
)


def drawn(seed: int) -> tuple[str, Json]:
    """A request: where to, and what."""
    dice = random.Random(seed)
    path = dice.choice((CHAT, CHAT, COMPLETIONS))
    body: Json = {
        "seed": seed,
        "temperature": dice.choice((0, 0.7, 1)),
        "max_tokens": dice.randint(1, 24),
    }
    words = "".join(dice.choices("abc é?", k=dice.randint(1, 60)))
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": words}]
    else:
        body["prompt"] = dice.choice((words, [*words.encode()], [words, "b"], [[1, 2, 3], [4]]))
    if path == CHAT and dice.random() < 0.6:
        body |= dice.choice(SPOKEN)
    elif dice.random() < 0.4:
        body |= dice.choice(STRUCTURES)
    if {"tools", "response_format", "guided_regex"} & set(body):
        body["max_tokens"], body["logit_bias"] = dice.choice((20, 160, 160)), NO_BLANKS
    options: tuple[Json, ...] = (
        {"n": dice.randint(2, 3)},
        {"stop": dice.choice(("e", ["a", "o "], ["&&", "}}</"]))},
        {"top_p": 0.8},
        {"top_k": 9, "repetition_penalty": 1.2},
        {"return_token_ids": True},
        {"min_tokens": min(3, body["max_tokens"])},
        {"logit_bias": {**NO_BLANKS, "511": 6}},
        {"ignore_eos": True, "max_tokens": min(30, body["max_tokens"])},
        {"logprobs": True, "top_logprobs": dice.randint(0, 20)}
        if path == CHAT
        else {"logprobs": dice.randint(0, 20)},
        {"presence_penalty": 0.5} if path == CHAT else {"echo": True},
        {"stop_token_ids": [70, 71, 72]},
    )
    for option in dice.sample(options, dice.randint(0, 5)):
        body |= option
    return path, body


def assert_same(got: Any, wanted: Any, told: str) -> None:
    """Numbers may differ by rounding: they were computed in other company."""
    match wanted:
        case float():
            assert abs(got - wanted) < CLOSE, told
        case dict():
            assert got.keys() == wanted.keys(), f"{told}: {got} where {wanted} is right"
            for key in wanted:
                assert_same(got[key], wanted[key], f"{told}.{key}")
        case list():
            assert len(got) == len(wanted), f"{told}: {got} where {wanted} is right"
            for place, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
                assert_same(mine, theirs, f"{told}.{place}")
        case _:
            assert got == wanted, f"{told}: {got!r} where {wanted!r} is right"


def without_ids(choices: list[Json]) -> list[Json]:
    ids = [
        call.pop("id")
        for choice in choices
        for call in choice.get("message", {}).get("tool_calls", ())
    ]
    assert len(set(ids)) == len(ids) and all(ids)
    return choices


def by_likelihood(choices: list[Json]) -> list[Json]:
    """Of equally likely tokens any may be named first, or be the last that is named."""
    for choice in choices:
        for at in (choice["logprobs"] or {}).get("content") or ():
            at["top_logprobs"] = sorted(top["logprob"] for top in at["top_logprobs"])
        tops = (choice["logprobs"] or {}).get("top_logprobs")
        if tops:
            choice["logprobs"]["top_logprobs"] = [top and sorted(top.values()) for top in tops]
    return choices


async def compare(served: Served, path: str, body: Json, told: str) -> list[Json]:
    """The whole answer's choices, once the stream has said the same. No chunk has log-probabilities
    if no token is of the content; the whole answer has an empty list then."""
    status, whole = await ask(served, body, path)
    assert status == 200, f"{told}: {whole}"
    chunks = await stream(served, body, path)
    together = joined_chat(chunks) if path == CHAT else joined(chunks)
    for choice in together if path == CHAT else ():
        if choice["message"]["content"] == "" and "tool_calls" in choice["message"]:
            choice["message"]["content"] = None
        if choice["logprobs"] is None and body.get("logprobs"):
            choice["logprobs"] = {"content": [], "refusal": None}
    mine, theirs = (by_likelihood(without_ids(choices)) for choices in (together, whole["choices"]))
    assert_same(mine, theirs, told)
    for key in ("prompt_tokens", "completion_tokens"):
        assert chunks[-1]["usage"][key] == whole["usage"][key], told
    return theirs


async def test_streams_and_whole_answers_agree(tmp_path: Path) -> None:
    limiter = trio.CapacityLimiter(AT_A_TIME)
    answers: list[Json] = []

    async def one(seed: int) -> None:
        path, body = drawn(seed)
        told = f"request {seed}: {path} {json.dumps(body)}"
        async with limiter:
            try:
                answers.extend(await compare(served, path, body, told))
                return
            except AssertionError:
                await trio.lowlevel.checkpoint()
        again.append((path, body, told))

    again: list[tuple[str, Json, str]] = []
    async with serving(save_with_markers(tmp_path)) as served:
        async with trio.open_nursery() as nursery:
            for seed in range(REQUESTS):
                nursery.start_soon(one, seed)
        # Two tokens as good as equal may be drawn either way, but hardly so alone.
        for path, body, told in again:
            answers += await compare(served, path, body, told)
    assert len(again) <= REQUESTS // 50
    assert_various(answers)


def assert_various(answers: list[Json]) -> None:
    """What was compared holds everything that there is to compare."""
    messages = [choice["message"] for choice in answers if "message" in choice]
    assert sum("tool_calls" in message for message in messages) > 10
    assert any(len(message.get("tool_calls", ())) > 1 for message in messages)
    assert any(message.get("reasoning_content") for message in messages)
    assert any(message["content"] for message in messages)
    assert sum(choice["logprobs"] is not None for choice in answers) > 20
    assert {choice["finish_reason"] for choice in answers} == {"stop", "length", "tool_calls"}
    assert {type(choice["matched_stop"]) for choice in answers} == {str, int, type(None)}
    assert any("token_ids" in choice for choice in answers)


def test_the_comparison_can_fail() -> None:
    assert_same([{"a": 1.0, "b": None}], [{"a": 1.0001, "b": None}], "")
    for wrong in ([{"a": 1.001, "b": None}], [{"a": 1.0}], [], [{"a": 1.0, "b": ""}]):
        with pytest.raises(AssertionError):
            assert_same(wrong, [{"a": 1.0, "b": None}], "")
