"""Prompts and answers as long as the context, over sockets and without any setting."""

from __future__ import annotations

import attrs

from tests.fakes import FakeEngine, card
from tests.web.serving import ask, serving
from trouper.protocol.model import LoadedModel

LONG = 131_072
CHAT = "/v1/chat/completions"


@attrs.define(eq=False)
class LongEngine(FakeEngine):
    context_length: int = LONG

    async def load(self) -> LoadedModel:
        return LoadedModel(card(self.context_length), self.tokenizer)


async def test_a_prompt_may_fill_the_context() -> None:
    async with serving(LongEngine()) as served:
        status, answer = await ask(served, {"prompt": "a" * (LONG - 1), "max_tokens": 1})
        assert status == 200, answer
        assert answer["usage"] == answer["usage"] | {
            "prompt_tokens": LONG - 1,
            "completion_tokens": 1,
        }
        status, answer = await ask(served, {"prompt": "a" * LONG, "max_tokens": 1})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_shorter_limit_is_kept_and_named() -> None:
    async with serving(LongEngine(), settings={"max_prompt_tokens": 50}) as served:
        assert (await ask(served, {"prompt": "a" * 50, "max_tokens": 1}))[0] == 200
        status, answer = await ask(served, {"prompt": "a" * 51, "max_tokens": 1})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "50 tokens (--max-prompt-tokens)" in answer["error"]["message"]


async def test_an_answer_without_a_length_gets_what_the_context_leaves() -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
    async with serving(LongEngine(context_length=900)) as served:
        _, answer = await ask(served, chat, CHAT)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 900
    async with serving(
        LongEngine(context_length=900), settings={"default_max_tokens": 3}
    ) as served:
        _, answer = await ask(served, chat, CHAT)
        assert answer["usage"]["completion_tokens"] == 3
