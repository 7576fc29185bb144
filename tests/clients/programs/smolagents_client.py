"""smolagents: its agent that calls tools, which must call one in each step, the last for the
answer."""

import loop
from smolagents import OpenAIServerModel, Tool, ToolCallingAgent


def tool_of(tools, name, inputs):
    if name == "weigh":

        def forward(self, place, options):
            return tools.weigh(place, options)
    else:

        def forward(self, text):
            return tools.note(text)

    body = {
        "name": name,
        "description": f"can {name}",
        "inputs": inputs,
        "output_type": "string",
        "forward": forward,
    }
    return type(name.title(), (Tool,), body | {"skip_forward_signature_validation": True})()


def run(streamed):
    tools = loop.Tools()
    weigh = tool_of(
        tools,
        "weigh",
        {
            "place": {"type": "string", "description": "where"},
            "options": {"type": "object", "description": "how"},
        },
    )
    note = tool_of(tools, "note", {"text": {"type": "string", "description": "what"}})
    model = OpenAIServerModel(model_id="any", api_base=f"{loop.URL}/v1", api_key="none")
    agent = ToolCallingAgent(
        tools=[weigh, note], model=model, stream_outputs=streamed, verbosity_level=0, max_steps=8
    )
    result = agent.run(loop.QUESTION, return_full_result=True)
    assert result.state == "success", result.state
    tools.check(result.output)
    loop.check_usage(result.token_usage.input_tokens, result.token_usage.output_tokens)


loop.case("chat, forced", False, lambda: run(False))
loop.case("chat, forced", True, lambda: run(True))
