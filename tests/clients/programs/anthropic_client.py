"""anthropic: messages, plain and with the helper of streams, with thinking, and its own runner of
tools."""

import anthropic
import loop
from anthropic import beta_tool

client = anthropic.Anthropic(base_url=loop.URL, api_key="none", max_retries=0)
TOOLS = [
    {"name": name, "description": f"can {name}", "input_schema": schema}
    for name, schema in loop.SCHEMAS.items()
]


def messages(streamed, **more):
    tools, ids = loop.Tools(), []
    said = [{"role": "user", "content": loop.QUESTION}]
    for _ in range(loop.MAX_TURNS):
        asked = {
            "model": "any",
            "max_tokens": 4000,
            "system": loop.SYSTEM,
            "messages": said,
            "tools": TOOLS,
        } | more
        if streamed:
            with client.messages.stream(**asked) as stream:
                events = list(stream)
                message = stream.get_final_message()
            assert events[0].type == "message_start" and events[-1].type == "message_stop"
        else:
            message = client.messages.create(**asked)
        assert message.id.startswith("msg_")
        loop.check_usage(
            message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0),
            message.usage.output_tokens,
        )
        said.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if calls else "end_turn"), message.stop_reason
        if not calls:
            loop.check_ids(ids)
            tools.check("".join(block.text for block in message.content if block.type == "text"))
            return
        ids += [call.id for call in calls]
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": tools.run(call.name, call.input),
            }
            for call in calls
        ]
        said.append({"role": "user", "content": results})
    raise AssertionError("it does not end")


def runner(streamed):
    tools = loop.Tools()

    @beta_tool(input_schema=loop.WEIGH)
    def weigh(place: str, options: dict) -> str:
        """Weigh."""
        return tools.weigh(place, options)

    @beta_tool(input_schema=loop.NOTE)
    def note(text: str) -> str:
        """Note."""
        return tools.note(text)

    asked = {
        "model": "any",
        "max_tokens": 4000,
        "messages": [{"role": "user", "content": loop.QUESTION}],
    }
    if streamed:
        for stream in client.beta.messages.tool_runner(tools=[weigh, note], stream=True, **asked):
            for _ in stream:
                pass
            last = stream.get_final_message()
    else:
        last = client.beta.messages.tool_runner(tools=[weigh, note], **asked).until_done()
    tools.check("".join(block.text for block in last.content if block.type == "text"))


THINKING = {"thinking": {"type": "enabled", "budget_tokens": 2000}}
for streamed in (False, True):
    loop.case("messages", streamed, lambda streamed=streamed: messages(streamed))
    loop.case(
        "messages, thinking", streamed, lambda streamed=streamed: messages(streamed, **THINKING)
    )
    loop.case("tool_runner", streamed, lambda streamed=streamed: runner(streamed))
