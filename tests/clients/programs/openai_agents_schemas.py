"""openai-agents: objects of each class as an agent's output, strict and not, with and without a
tool that must be called first, over responses and chat."""

import asyncio

import loop
import schema_cases
from agents import (
    Agent,
    AgentOutputSchema,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, BadRequestError

set_tracing_disabled(True)


async def answer_of(kind, value, streamed, strict, forced):
    cities = []

    @function_tool
    def look_up(city: str) -> str:
        """Look up the weather."""
        cities.append(city)
        return schema_cases.WEATHER

    async with AsyncOpenAI(base_url=f"{loop.URL}/v1", api_key="none", max_retries=0) as client:
        agent = Agent(
            name="writer",
            tools=[look_up] if forced else [],
            model=kind("any", openai_client=client),
            model_settings=ModelSettings(tool_choice=forced),
            output_type=AgentOutputSchema(type(value), strict_json_schema=strict),
        )
        if streamed:
            result = Runner.run_streamed(agent, schema_cases.question(value))
            events = [event async for event in result.stream_events()]
            assert any(event.type == "raw_response_event" for event in events)
        else:
            result = await Runner.run(agent, schema_cases.question(value))
    assert cities == (["Oslo"] if forced else []), cities
    return result.final_output


def run(label, kind, streamed, *, strict, forced=None, names=schema_cases.VALUES):
    schema_cases.each(
        label,
        streamed,
        lambda value: asyncio.run(answer_of(kind, value, streamed, strict, forced)),
        names,
    )


def refused(kind, forced):
    """OpenAI refuses what a strict schema cannot ask for, too."""
    try:
        asyncio.run(answer_of(kind, schema_cases.VALUES["sets"], False, True, forced))
    except BadRequestError as error:
        named = error.param
    else:
        named = "nothing"
    assert named.endswith("tags.uniqueItems"), named


for name, kind in (("responses", OpenAIResponsesModel), ("chat", OpenAIChatCompletionsModel)):
    for streamed in (False, True):
        run(f"{name}, strict", kind, streamed, strict=True, names=schema_cases.STRICT)
        run(f"{name}, not strict", kind, streamed, strict=False)
        for forced in ("required", "look_up"):
            label = f"{name}, strict, tool {forced}"
            run(label, kind, streamed, strict=True, forced=forced, names=schema_cases.STRICT)
        label = f"{name}, not strict, tool required"
        run(label, kind, streamed, strict=False, forced="required")
    loop.case(f"{name}: a strict set is refused by name", False, lambda k=kind: refused(k, None))
