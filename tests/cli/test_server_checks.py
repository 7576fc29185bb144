"""What /set and /model of a chat refuse, by the description of a real server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest
import trio

from tests.web.serving import serving
from trouper.cli.client import Where
from trouper.cli.conversation import CommandRefused, Conversation, follow
from trouper.cli.server_checks import ServerChecks

SET = (
    ("temprature 0", "there is no parameter temprature; did you mean temperature?"),
    ("temperature abc", 'temperature must be a number from 0 to 2, not "abc"'),
    ("temperature 3", "temperature must be a number from 0 to 2, not 3"),
    ("temperature true", "temperature must be a number from 0 to 2, not true"),
    ("seed 1.5", "seed must be a whole number, not 1.5"),
    ("reasoning_effort much", "reasoning_effort must be high, low, medium, minimal, none, xhigh"),
    ("logit_bias 3", "logit_bias must be an object, not 3"),
    ("response_format json", 'response_format must be an object, not "json"'),
    ("temperature 0.5", ""),
    ("max_tokens 100", ""),
    ("stop END", ""),
    ("logprobs true", ""),
    ('stop ["a", "b"]', ""),
    ("reasoning_effort low", ""),
    ("temperature null", ""),
    ("enable_thinking false", ""),
)


async def checked(served_port: int, check: Callable[[Conversation], Any]) -> Any:
    def run() -> Any:
        with Where(f"http://127.0.0.1:{served_port}").client() as client:
            return check(Conversation(checks=ServerChecks(client)))

    return await trio.to_thread.run_sync(run)


def reply_to(conversation: Conversation, line: str) -> str:
    try:
        follow(conversation, line)
    except CommandRefused as refused:
        return str(refused)
    return ""


async def test_set_refuses_misspelt_names_and_values_that_the_server_would_refuse() -> None:
    async with serving() as served:

        def check(conversation: Conversation) -> list[str]:
            return [reply_to(conversation, f"/set {line}") for line, _ in SET]

        replies = await checked(served.port, check)
    for (line, expected), answer in zip(SET, replies, strict=True):
        assert answer.startswith(expected) and bool(answer) == bool(expected), line


async def test_model_refuses_a_name_that_is_not_served_and_keeps_the_old_one() -> None:
    async with serving() as served:

        def check(conversation: Conversation) -> tuple[str, str, str | None]:
            refusal = reply_to(conversation, "/model nope")
            follow(conversation, "/model fake")
            return refusal, reply_to(conversation, "/model nope"), conversation.model

        first, second, model = await checked(served.port, check)
    assert first == second == "the model 'nope' does not exist here; 'fake' is served"
    assert model == "fake"


@pytest.mark.parametrize("document", [{}, {"paths": []}, {"paths": {"/v1/chat/completions": {}}}])
def test_a_server_without_a_description_excludes_nothing(document: dict[str, Any]) -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, json=document))
    with httpx2.Client(transport=transport, base_url="http://x") as client:
        conversation = Conversation(checks=ServerChecks(client))
        assert reply_to(conversation, "/set temprature abc") == ""


def test_a_server_that_does_not_answer_refuses_a_model_and_no_parameter() -> None:
    def refuse(_: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused")

    with httpx2.Client(transport=httpx2.MockTransport(refuse), base_url="http://x") as client:
        conversation = Conversation(checks=ServerChecks(client))
        assert reply_to(conversation, "/set temprature abc") == ""
        assert "no server answers any more" in reply_to(conversation, "/model other")
