"""openai-agents: an agent with function tools (strict schemas), over responses and over chat."""

import asyncio

import loop
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Options(BaseModel):
    unit: str
    counts: list[int]


async def run(kind, streamed):
    tools = loop.Tools()

    @function_tool
    def weigh(place: str, options: Options) -> str:
        """Weigh what is there."""
        return tools.weigh(place, options)

    @function_tool
    def note(text: str) -> str:
        """Note it."""
        return tools.note(text)

    async with AsyncOpenAI(base_url=f"{loop.URL}/v1", api_key="none", max_retries=0) as client:
        agent = Agent(
            name="scales",
            instructions=loop.SYSTEM,
            tools=[weigh, note],
            model=kind("any", openai_client=client),
            model_settings=ModelSettings(include_usage=True),  # Of a streamed chat.
        )
        if streamed:
            result = Runner.run_streamed(agent, loop.QUESTION)
            events = [event async for event in result.stream_events()]
            assert any(event.type == "raw_response_event" for event in events)
        else:
            result = await Runner.run(agent, loop.QUESTION)
    tools.check(result.final_output)
    usage = result.context_wrapper.usage
    assert usage.requests in (3, 4), usage  # Some formats have one call in an answer.
    loop.check_usage(usage.input_tokens, usage.output_tokens, usage.total_tokens)
    calls = [item.raw_item for item in result.new_items if item.type == "tool_call_item"]
    loop.check_ids([call.call_id for call in calls])


for name, kind in (("responses", OpenAIResponsesModel), ("chat", OpenAIChatCompletionsModel)):
    for streamed in (False, True):
        loop.case(
            name, streamed, lambda kind=kind, streamed=streamed: asyncio.run(run(kind, streamed))
        )
