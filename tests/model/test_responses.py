"""The responses API on the embedded model: a conversation by ids, a schema, a forced tool."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import openai
import pydantic
import trio

from trouper import Runtime, ServerSettings, Settings, run_runtime
from trouper.web.server import serve_http


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    capital: bool


TOOL: Any = {
    "type": "function",
    "name": "look_up",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def converse(url: str) -> None:
    with openai.OpenAI(
        base_url=url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        ask = partial(
            client.responses.create,
            model="SmolLM2-135M-Instruct",
            temperature=0,
            max_output_tokens=8,
        )
        first = ask(input="What is the capital of France?", instructions="Answer in one word.")
        second = ask(
            input="And of Italy?", instructions="Answer in one word.", previous_response_id=first.id
        )
        again = ask(
            input=[
                {"role": "user", "content": "What is the capital of France?"},
                {"role": "assistant", "content": first.output_text},
                {"role": "user", "content": "And of Italy?"},
            ],
            instructions="Answer in one word.",
        )
        assert again.output_text == second.output_text != ""
        assert first.usage is not None and second.usage is not None and again.usage is not None
        assert second.usage.input_tokens == again.usage.input_tokens
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1
        city = client.responses.parse(
            model="SmolLM2-135M-Instruct", input="Paris", temperature=0, text_format=City
        )
        assert isinstance(city.output_parsed, City)
        events: list[Any] = list(
            ask(
                input="Rome?",
                tools=[TOOL],
                tool_choice="required",
                max_output_tokens=40,
                stream=True,
            )
        )
        last = events[-1]
        assert last.type == "response.completed"
        [call] = last.response.output
        assert call.type == "function_call" and json.loads(call.arguments)["city"] in (
            "Paris",
            "Rome",
        )


async def test_a_conversation_a_schema_and_a_tool() -> None:
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(
            run_runtime, Settings(no_ssd=True, completion_batch_size=4)
        )
        start = partial(serve_http, runtime, ServerSettings(port=0), shutdown=shutdown)
        [url] = await nursery.start(start)
        await trio.to_thread.run_sync(converse, f"{url}/v1")
        await runtime.drain(5)
        shutdown.set()
