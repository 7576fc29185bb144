"""A call whose arguments come a few characters at a time: the official clients put the same call
together in every dialect. The parser is scripted, since what is tested here is how its parts are
formatted."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.fakes import FakeEngine
from tests.web.batching import strict
from tests.web.responses import TOOL, saying
from tests.web.serving import Served, serving
from tests.web.test_openai_client import in_thread
from trouper.web.output import output_parser
from trouper.web.output.parsed_delta import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    ParsedDelta,
    Reasoning,
)
from trouper.web.output.tool_forms import ToolForm

ARGUMENTS = {"a": 7, "text": 'ä "quoted" line\n' * 5, "empty": {}}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
ASKED: Any = [{"role": "user", "content": "x"}]
FUNCTION: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class Scripted:
    """Reasoning, text, two calls in parts of three characters, and one without arguments' text
    between."""

    ended_in_call = False

    def __init__(self) -> None:
        self._parts: list[ParsedDelta] = [Reasoning("hm"), Content("Now.")]
        for index in range(2):
            self._parts.append(CallStarted(index, ToolForm("f")))
            self._parts += [
                CallArguments(index, TEXT[at : at + 3]) for at in range(0, len(TEXT), 3)
            ]
            self._parts.append(CallEnded(index))

    @property
    def kind(self) -> str:
        return (
            {Reasoning: "reasoning", Content: "content"}.get(type(self._parts[0]), "call")
            if self._parts
            else "content"
        )

    def push(self, text: str) -> list[ParsedDelta]:
        """One part for each character that the model says."""
        parts, self._parts = self._parts[: len(text)], self._parts[len(text) :]
        return parts

    def end(self, *, cut: bool = False) -> list[ParsedDelta]:
        parts, self._parts = self._parts, []
        return parts

    decided = 0

    def take_spans(self) -> list[tuple[int, int]]:
        return []

    def reason(self, reason: str) -> str:
        return "tool_calls" if reason == "stop" else reason


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    monkeypatch.setattr(
        f"trouper.web.serving.service.{output_parser.OutputParser.__name__}",
        lambda *_, **__: Scripted(),
    )
    return saying("z" * 500)


async def test_chat(engine: FakeEngine) -> None:
    def use(served: Served) -> None:
        with strict(served.base_url) as client:
            asked: Any = {"model": "fake", "messages": ASKED, "tools": [FUNCTION]}
            with client.chat.completions.stream(
                **asked, stream_options={"include_usage": True}
            ) as stream:
                events = list(stream)
                streamed = stream.get_final_completion()
            whole = client.chat.completions.create(**asked)
        deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
        assert len(deltas) > len(TEXT) // 3, "they came one by one"
        for completion in (streamed, whole):
            [choice] = completion.choices
            assert choice.finish_reason == "tool_calls"
            calls: list[Any] = [*(choice.message.tool_calls or ())]
            assert [
                (call.function.name, json.loads(call.function.arguments)) for call in calls
            ] == [("f", ARGUMENTS)] * 2
            assert len({call.id for call in calls}) == 2
        assert streamed.usage is not None and whole.usage is not None
        assert streamed.usage.completion_tokens_details == whole.usage.completion_tokens_details
        assert whole.usage.completion_tokens_details is not None
        assert whole.usage.completion_tokens_details.reasoning_tokens == 1

    async with serving(engine) as served:
        await in_thread(use, served)


async def test_responses(engine: FakeEngine) -> None:
    def use(served: Served) -> None:
        with strict(served.base_url) as client:
            asked: Any = {"model": "fake", "input": "x", "tools": [TOOL]}
            with client.responses.stream(**asked) as stream:
                events = list(stream)
                streamed = stream.get_final_response()
            whole = client.responses.create(**asked)
        deltas = [
            event for event in events if event.type == "response.function_call_arguments.delta"
        ]
        assert len(deltas) > len(TEXT) // 3
        assert deltas[-1].snapshot.endswith(TEXT), "the client's own sum"
        for response in (streamed, whole):
            calls: list[Any] = [item for item in response.output if item.type == "function_call"]
            assert [(call.name, json.loads(call.arguments)) for call in calls] == [
                ("f", ARGUMENTS)
            ] * 2
            assert len({call.call_id for call in calls}) == 2
            assert (
                response.usage is not None
                and response.usage.output_tokens_details.reasoning_tokens == 1
            )

    async with serving(engine) as served:
        await in_thread(use, served)


async def test_messages(engine: FakeEngine) -> None:
    def use(served: Served) -> None:
        with anthropic.Anthropic(
            base_url=f"http://127.0.0.1:{served.port}", api_key="none", max_retries=0
        ) as client:
            tools: Any = [{"name": "f", "input_schema": {"type": "object"}}]
            asked: Any = {"model": "fake", "max_tokens": 1000, "messages": ASKED, "tools": tools}
            with client.messages.stream(**asked) as stream:
                events = list(stream)
                streamed = stream.get_final_message()
            whole = client.messages.create(**asked)
        assert sum(event.type == "input_json" for event in events) > len(TEXT) // 3
        for message in (streamed, whole):
            calls: list[Any] = [block for block in message.content if block.type == "tool_use"]
            assert [(call.name, call.input) for call in calls] == [("f", ARGUMENTS)] * 2
            assert len({call.id for call in calls}) == 2
            assert message.stop_reason == "tool_use"
            assert message.usage.output_tokens_details is not None
            assert message.usage.output_tokens_details.thinking_tokens == 1

    async with serving(engine) as served:
        await in_thread(use, served)


async def test_the_name_comes_before_the_arguments_in_every_dialect(engine: FakeEngine) -> None:
    """Clients show the tool as soon as it is known."""

    def use(served: Served) -> None:
        with openai.OpenAI(base_url=served.base_url, api_key="none", max_retries=0) as client:
            asked: Any = {"model": "fake", "messages": ASKED, "tools": [FUNCTION], "stream": True}
            parts = [
                part
                for chunk in client.chat.completions.create(**asked)
                for part in chunk.choices[0].delta.tool_calls or ()
            ]
        firsts = [part for part in parts if part.id]
        assert [(part.function.name, part.function.arguments) for part in firsts] == [("f", "")] * 2
        assert all(part.function.name is None for part in parts if not part.id)

    async with serving(engine) as served:
        await in_thread(use, served)
