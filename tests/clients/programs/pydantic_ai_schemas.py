"""pydantic-ai: objects of each class as a forced tool and as the answer's format, over three
APIs."""

import asyncio

import loop
import schema_cases
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

OPENAI = OpenAIProvider(base_url=f"{loop.URL}/v1", api_key="none")
ANTHROPIC = AnthropicProvider(base_url=loop.URL, api_key="none")
MODELS = {
    "chat": OpenAIChatModel("any", provider=OPENAI),
    "responses": OpenAIResponsesModel("any", provider=OPENAI),
    # The library asks no other model of Anthropic's for a format.
    "messages": AnthropicModel("claude-sonnet-4-5", provider=ANTHROPIC),
}
WITH_A_TOOL = ("sets", "times", "decimals", "discriminated unions")
CLOSED = [name for name in schema_cases.VALUES if name not in schema_cases.OPEN | {"recursion"}]
FORMATS = {"chat": schema_cases.VALUES, "responses": schema_cases.VALUES, "messages": CLOSED}
"""The library asks Anthropic for no recursive format, and for no names that are not listed."""


async def answer_of(model, output, value, streamed, with_tool):
    agent = Agent(model, output_type=output(type(value)), retries=0)
    cities, seen = [], []
    if with_tool:

        @agent.tool_plain
        def look_up(city: str) -> str:
            cities.append(city)
            return schema_cases.WEATHER

    async def handler(_, events):
        seen.extend([event async for event in events])

    result = await agent.run(
        schema_cases.question(value), event_stream_handler=handler if streamed else None
    )
    assert bool(seen) == streamed
    assert cities == (["Oslo"] if with_tool else []), cities
    return result.output


def run(name, output, label, streamed, *, names=schema_cases.VALUES, with_tool=False):
    schema_cases.each(
        f"{name}, {label}",
        streamed,
        lambda value: asyncio.run(answer_of(MODELS[name], output, value, streamed, with_tool)),
        names,
    )


for name in MODELS:
    for streamed in (False, True):
        run(name, ToolOutput, "tool", streamed)
        run(name, NativeOutput, "format", streamed, names=FORMATS[name])
        for output, kind in ((ToolOutput, "tool"), (NativeOutput, "format")):
            label = f"{kind} with a tool"
            run(name, output, label, streamed, names=WITH_A_TOOL, with_tool=True)
    run(name, PromptedOutput, "prompted", False)
