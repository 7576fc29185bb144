"""Complete answers that take long to format: a thread does it, and what belongs to the event loop
is done there."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.fakes import FakeEngine
from tests.web.serving import ask, exchange, get, serving
from trouper.web.openai import embeddings
from trouper.web.openai.chat_dialect import ChatDialect
from trouper.web.output.dialect import Choice
from trouper.web.streaming import response_streams
from trouper.web.streaming.response_streams import LONG_SCORES

LONG_ANSWER = 100


@pytest.fixture(autouse=True)
def soon_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_streams, "LONG_ANSWER", LONG_ANSWER)


@pytest.mark.parametrize(
    ("tokens", "include"),
    [(LONG_SCORES + 1, ["message.output_text.logprobs"]), (LONG_ANSWER + 1, [])],
)
async def test_a_long_response_is_answered_and_stored(tokens: int, include: list[str]) -> None:
    async with serving(FakeEngine()) as served:
        body = {"input": "x", "max_output_tokens": tokens, "ignore_eos": True, "include": include}
        status, answer = await ask(served, body, "/v1/responses")
        assert (status, answer["status"], answer["usage"]["output_tokens"]) == (
            200,
            "incomplete",
            tokens,
        )
        [message] = answer["output"]
        assert len(message["content"][0]["logprobs"]) == (tokens if include else 0)
        assert (await exchange(served, get(f"/v1/responses/{answer['id']}")))[0] == 200
        status, more = await ask(
            served, {"input": "y", "previous_response_id": answer["id"]}, "/v1/responses"
        )
        assert (status, more["previous_response_id"]) == (200, answer["id"])


@pytest.mark.parametrize(("tokens", "on_loop"), [(LONG_ANSWER, True), (LONG_ANSWER + 1, False)])
async def test_a_long_answer_is_parsed_in_a_thread(
    tokens: int, on_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    body = ChatDialect.body

    def recorded(dialect: ChatDialect, choices: list[Choice]) -> Any:
        seen.append(trio.lowlevel.in_trio_run())
        return body(dialect, choices)

    monkeypatch.setattr(ChatDialect, "body", recorded)
    async with serving(FakeEngine()) as served:
        asked = {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        status, answer = await ask(served, asked, "/v1/chat/completions")
    assert (status, answer["usage"]["completion_tokens"], seen) == (200, tokens, [on_loop])


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_many_vectors_are_encoded_in_a_thread_and_are_the_same(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    body = embeddings.embeddings_body

    def recorded(*arguments: Any) -> Any:
        seen.append(trio.lowlevel.in_trio_run())
        return body(*arguments)

    monkeypatch.setattr(embeddings, "embeddings_body", recorded)
    asked = {"input": ["a", "bb", "ccc"], "encoding_format": encoding}
    async with serving(FakeEngine()) as served:
        status, short = await ask(served, asked, "/v1/embeddings")
        monkeypatch.setattr(embeddings, "LONG_VECTORS", 1)
        assert (status, await ask(served, asked, "/v1/embeddings")) == (200, (200, short))
    assert seen == [True, False]
