"""openai: chat (plain, strict tools, the helpers of streams) and responses."""

import json

import loop
import openai

client = openai.OpenAI(base_url=f"{loop.URL}/v1", api_key="none", max_retries=0)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in loop.SCHEMAS.items()
]
FLAT = [
    {"type": "function", "name": name, "parameters": schema, "strict": True}
    for name, schema in loop.SCHEMAS.items()
]


def added(chunks):
    """A message and the usage, put together by hand as programs without a helper do."""
    message, usage, reason = {"role": "assistant", "content": "", "tool_calls": []}, None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            message["content"] += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                if part.index == len(message["tool_calls"]):
                    function = {"name": part.function.name, "arguments": ""}
                    message["tool_calls"].append(
                        {"id": part.id, "type": "function", "function": function}
                    )
                message["tool_calls"][part.index]["function"]["arguments"] += (
                    part.function.arguments or ""
                )
    if not message["tool_calls"]:
        del message["tool_calls"]
    return message, reason, usage


def chat(how):
    tools, ids = loop.Tools(), []
    messages = [
        {"role": "system", "content": loop.SYSTEM},
        {"role": "user", "content": loop.QUESTION},
    ]
    asked = {"model": "any", "tools": TOOLS}
    for _ in range(loop.MAX_TURNS):
        if how == "by hand":
            stream = client.chat.completions.create(
                messages=messages, stream=True, stream_options={"include_usage": True}, **asked
            )
            message, reason, usage = added(stream)
        else:
            if how == "helper":
                with client.chat.completions.stream(
                    messages=messages, stream_options={"include_usage": True}, **asked
                ) as stream:
                    kinds = {event.type for event in stream}
                    answer = stream.get_final_completion()
                assert "chunk" in kinds
            elif how == "parse":
                answer = client.chat.completions.parse(messages=messages, **asked)
            else:
                answer = client.chat.completions.create(messages=messages, **asked)
            reason, usage = answer.choices[0].finish_reason, answer.usage
            message = answer.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"})
            for call in message.get("tool_calls", ()):
                call["function"].pop("parsed_arguments", None)
            assert answer.id.startswith("chatcmpl-")
        loop.check_usage(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
        messages.append(message)
        calls = message.get("tool_calls") or ()
        assert reason == ("tool_calls" if calls else "stop"), reason
        if not calls:
            loop.check_ids(ids)
            tools.check(message["content"])
            return
        for call in calls:
            ids.append(call["id"])
            result = tools.run(call["function"]["name"], json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    raise AssertionError("it does not end")


def responses(streamed, chained):
    tools, ids, previous = loop.Tools(), [], None
    items = [{"role": "user", "content": loop.QUESTION}]
    for _ in range(loop.MAX_TURNS):
        asked = {"model": "any", "tools": FLAT, "input": items, "instructions": loop.SYSTEM}
        if previous:
            asked["previous_response_id"] = previous
        if streamed:
            with client.responses.stream(**asked) as stream:
                events = list(stream)
                response = stream.get_final_response()
            assert events[-1].type == "response.completed"
        else:
            response = client.responses.create(**asked)
        assert response.status == "completed" and response.id.startswith("resp_")
        loop.check_usage(
            response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens
        )
        if chained:
            previous, items = response.id, []
        else:
            items = items + [
                item.model_dump(exclude_none=True, exclude={"parsed_arguments"})
                for item in response.output
            ]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            loop.check_ids(ids)
            tools.check(response.output_text)
            return
        for call in calls:
            ids.append(call.call_id)
            result = tools.run(call.name, json.loads(call.arguments))
            items = [
                *items,
                {"type": "function_call_output", "call_id": call.call_id, "output": result},
            ]
    raise AssertionError("it does not end")


loop.case("chat", False, lambda: chat("create"))
loop.case("chat", True, lambda: chat("by hand"))
loop.case("chat, strict tools", False, lambda: chat("parse"))
loop.case("chat, strict tools", True, lambda: chat("helper"))
for chained, name in ((False, "responses"), (True, "responses, previous_response_id")):
    loop.case(name, False, lambda chained=chained: responses(False, chained))
    loop.case(name, True, lambda chained=chained: responses(True, chained))
