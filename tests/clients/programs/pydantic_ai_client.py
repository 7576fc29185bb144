"""pydantic-ai: an agent with system prompt and instructions, text and an object as its output, over
three APIs."""

import asyncio

import loop
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Options(BaseModel):
    unit: str
    counts: list[int]


class Report(BaseModel):
    summary: str
    places: int


def models():
    openai = OpenAIProvider(base_url=f"{loop.URL}/v1", api_key="none")
    return {
        "chat": OpenAIChatModel("any", provider=openai),
        "responses": OpenAIResponsesModel("any", provider=openai),
        "messages": AnthropicModel(
            "any", provider=AnthropicProvider(base_url=loop.URL, api_key="none")
        ),
    }


def agent_of(model, tools, output):
    agent = Agent(
        model, output_type=output, system_prompt=loop.SYSTEM, instructions="Be exact.", retries=0
    )

    @agent.tool_plain
    def weigh(place: str, options: Options) -> str:
        return tools.weigh(place, options)

    @agent.tool_plain
    def note(text: str) -> str:
        return tools.note(text)

    return agent


async def run(model, streamed, output):
    tools = loop.Tools()
    agent = agent_of(model, tools, output)
    seen = []

    async def handler(_, events):
        seen.extend([event async for event in events])

    # `run_stream` would end with the first text, which stands before a call here.
    result = await agent.run(loop.QUESTION, event_stream_handler=handler if streamed else None)
    assert bool(seen) == streamed
    last, usage = result.output, result.usage
    usage = usage() if callable(usage) else usage
    loop.check_usage(usage.input_tokens, usage.output_tokens)
    if output is Report:
        assert last.places == 2
        last = last.summary
    tools.check(last)
    ids = [
        part.tool_call_id
        for message in result.all_messages()
        for part in message.parts
        if part.part_kind == "tool-call"
    ]
    loop.check_ids(ids[: len(loop.CALLS)])


for name, model in models().items():
    for streamed in (False, True):
        for output, kind in ((str, ""), (Report, ", object")):
            loop.case(
                name + kind,
                streamed,
                lambda m=model, s=streamed, o=output: asyncio.run(run(m, s, o)),
            )
