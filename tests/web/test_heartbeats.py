"""`--heartbeat-s` holds in every dialect and every phase: what a silent stream sends is counted by
the official clients' own readers, and changes nothing of the answer that they put together."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import attrs
import openai
import pytest
import trio

from tests.fakes import EOS, FakeEngine
from tests.web.batching import strict
from tests.web.responses import CALL, TOOL
from tests.web.serving import STREAM, Served, eventually, pace, post, serving
from tests.web.test_openai_client import in_thread
from trouper.protocol.plans import Plan

BEATS = 3
TEXT = "Hello there"
PHASES = ("queue", "prefill", "held text", "slow generation")
FUNCTION: Any = {
    "type": "function",
    "function": {name: TOOL[name] for name in ("name", "description", "parameters")},
}
ASKED: Any = [{"role": "user", "content": "x"}]


@attrs.define(eq=False)
class Silence:
    """A phase that goes on until a client has counted its heartbeats."""

    phase: str
    over: trio.Event = attrs.field(factory=trio.Event)
    lead: int | None = None
    """Number of tokens of the answer that were held back while the client counted."""

    async def before(self, plan: Plan) -> None:
        await pace(plan)
        begun = self.phase == "prefill" or (self.phase == "slow generation" and plan.step > 12)
        if begun and plan.has_work:
            await self.over.wait()

    def token_at(self, _: int, position: int) -> int:
        """Blanks within a call are held back by any parser, and go on until the client has heard
        enough."""
        if self.phase != "held text":
            return TEXT.encode()[position] if position < len(TEXT) else EOS
        start, rest = CALL.encode()[:6], CALL.encode()[6:]
        if position < len(start):
            return start[position]
        if not self.over.is_set():
            return ord(" ")
        if self.lead is None:
            self.lead = position
        return rest[position - self.lead] if position - self.lead < len(rest) else EOS

    def heard(self) -> None:
        """Called in the client's thread."""
        trio.from_thread.run_sync(self.over.set)


def counted(events: Iterator[Any], beats: Callable[[Any], bool], silence: Silence) -> Iterator[Any]:
    """Pass events on, and end the silence once enough heartbeats were among them."""
    counter = itertools.count(1)
    for event in events:
        if beats(event) and next(counter) == BEATS:
            silence.heard()
        yield event


def by_chat(served: Served, silence: Silence) -> str:
    def is_empty(chunk: Any) -> bool:
        [choice] = chunk.choices
        return choice.finish_reason is None and not choice.delta.model_dump(exclude_unset=True)

    with strict(served.base_url) as client:
        asked: Any = {"model": "fake", "messages": ASKED, "stream": True, "tools": [FUNCTION]}
        text = ""
        for chunk in counted(client.chat.completions.create(**asked), is_empty, silence):
            delta = chunk.choices[0].delta
            text += delta.content or "".join(
                call.function.arguments for call in delta.tool_calls or ()
            )
    return text


def by_responses(served: Served, silence: Silence) -> str:
    def beats(event: Any) -> bool:
        return bool(event.type == "response.in_progress" and event.sequence_number > 1)

    with strict(served.base_url) as client:
        asked: Any = {"model": "fake", "input": "x", "stream": True, "tools": [TOOL]}
        events = list(counted(client.responses.create(**asked), beats, silence))
    assert [event.sequence_number for event in events] == [*range(len(events))]
    return "".join(event.delta for event in events if event.type.endswith(".delta"))


def by_messages(served: Served, silence: Silence) -> str:
    """The client's own stream shows no pings, so they are counted below it, in the lines of the
    response."""
    tool = {"name": "f", "input_schema": TOOL["parameters"]}
    with anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{served.port}", api_key="none", max_retries=0
    ) as client:
        asked: Any = {
            "model": "fake",
            "max_tokens": 1000,
            "messages": ASKED,
            "stream": True,
            "tools": [tool],
        }
        with client.messages.with_streaming_response.create(**asked) as response:
            counter = itertools.count(1)
            for line in response.iter_lines():
                if line == "event: ping" and next(counter) == BEATS:
                    silence.heard()
        silence.lead = None
        with client.messages.stream(
            **{key: value for key, value in asked.items() if key != "stream"}
        ) as stream:
            block: Any = stream.get_final_message().content[0]
    return block.text if block.type == "text" else json.dumps(block.input)


def by_completions(served: Served, silence: Silence) -> str:
    counter = itertools.count(1)
    with openai.OpenAI(
        base_url=served.base_url, api_key="none", max_retries=0, timeout=20
    ) as client:
        asked: Any = {"model": "fake", "prompt": "x", "stream": True, "max_tokens": 1000}
        with client.completions.with_streaming_response.create(**asked) as response:
            for line in response.iter_lines():
                if line == ": keep-alive" and next(counter) == BEATS:
                    silence.heard()
        return "".join(chunk.choices[0].text for chunk in client.completions.create(**asked))


CLIENTS = {
    "chat": by_chat,
    "responses": by_responses,
    "messages": by_messages,
    "completions": by_completions,
}


async def occupy(served: Served, silence: Silence) -> None:
    """Hold the only row."""
    async with await served.connect() as stream:
        await stream.send_all(post("/v1/completions", STREAM))
        await silence.over.wait()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dialect", CLIENTS)
async def test_no_phase_is_silent(dialect: str, phase: str) -> None:
    if (dialect, phase) == ("completions", "held text"):
        return  # No text of a completion is held by a parser.
    silence = Silence(phase)
    engine = FakeEngine(before_step=silence.before, token_at=silence.token_at)
    settings = {"completion_batch_size": 1} if phase == "queue" else {}
    async with (
        serving(engine, settings=settings, heartbeat_s=0.05) as served,
        trio.open_nursery() as nursery,
    ):
        if phase == "queue":
            nursery.start_soon(occupy, served, silence)
            await eventually(lambda: served.busy == 1)
        answer = await in_thread(CLIENTS[dialect], served, silence)
    assert answer == ('{"a": 1}' if phase == "held text" else TEXT)


async def test_the_head_goes_out_before_the_first_token() -> None:
    """Also where a dialect has no opening event."""
    silence = Silence("prefill")
    engine = FakeEngine(before_step=silence.before)
    async with serving(engine, heartbeat_s=60) as served, await served.connect() as stream:
        await stream.send_all(
            post("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 1})
        )
        received = b""
        with trio.fail_after(20):
            while b": keep-alive" not in received:
                received += await stream.receive_some()
        assert received.startswith(b"HTTP/1.1 200")
        silence.over.set()


async def test_a_heartbeat_belongs_to_an_answer_that_goes_on() -> None:
    """Nothing comes behind the end of an answer, though the other one of the response is still
    silent."""
    silence = Silence("")

    async def before(plan: Plan) -> None:
        await pace(plan)
        if plan.step > 40:
            await silence.over.wait()

    def ends_early(key: int, position: int) -> int:
        return EOS if position == 5 and (first := ends.setdefault(key, not ends)) and first else 97

    ends: dict[int, bool] = {}
    seen: list[Any] = []

    def use(served: Served) -> None:
        with openai.OpenAI(base_url=served.base_url, api_key="none", max_retries=0) as client:
            asked: Any = {
                "model": "fake",
                "messages": ASKED,
                "stream": True,
                "n": 2,
                "max_tokens": 200,
            }
            empty = lambda chunk: not chunk.choices[0].delta.model_dump(exclude_unset=True)  # noqa: E731
            seen.extend(counted(client.chat.completions.create(**asked), empty, silence))

    async with serving(
        FakeEngine(before_step=before, token_at=ends_early), heartbeat_s=0.05
    ) as served:
        await in_thread(use, served)
    for index in (0, 1):
        reasons = [
            chunk.choices[0].finish_reason for chunk in seen if chunk.choices[0].index == index
        ]
        assert None not in reasons[-1:] and reasons.count(None) == len(reasons) - 1
