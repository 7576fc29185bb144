"""litellm: chat by its three providers for such servers; its own message goes back as it is, as
agents built on it do."""

import json

import litellm
import loop

litellm.suppress_debug_info = True
litellm.num_retries = 0
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in loop.SCHEMAS.items()
]


def chat(model, base, streamed):
    tools, ids = loop.Tools(), []
    messages = [
        {"role": "system", "content": loop.SYSTEM},
        {"role": "user", "content": loop.QUESTION},
    ]
    for _ in range(loop.MAX_TURNS):
        asked = {
            "model": model,
            "api_base": base,
            "api_key": "none",
            "messages": messages,
            "tools": TOOLS,
        }
        if streamed:
            chunks = list(
                litellm.completion(stream=True, stream_options={"include_usage": True}, **asked)
            )
            answer = litellm.stream_chunk_builder(chunks, messages=messages)
        else:
            answer = litellm.completion(**asked)
        [choice] = answer.choices
        calls = choice.message.tool_calls or ()
        assert choice.finish_reason == ("tool_calls" if calls else "stop"), choice.finish_reason
        loop.check_usage(
            answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens
        )
        messages.append(choice.message.model_dump())
        if not calls:
            loop.check_ids(ids)
            tools.check(choice.message.content)
            return
        for call in calls:
            ids.append(call.id)
            result = tools.run(call.function.name, json.loads(call.function.arguments))
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "name": call.function.name,
                    "content": result,
                }
            )
    raise AssertionError("it does not end")


def full(model, base, streamed):
    def ask(text):
        message = {"role": "user", "content": text}
        answer = litellm.completion(
            model=model, api_base=base, api_key="none", messages=[message], stream=streamed
        )
        return list(answer) if streamed else answer

    loop.overflows(litellm.ContextWindowExceededError, ask)


for provider, base in (
    ("openai", f"{loop.URL}/v1"),
    ("hosted_vllm", f"{loop.URL}/v1"),
    ("anthropic", loop.URL),
):
    for streamed in (False, True):
        loop.case(
            f"{provider}/",
            streamed,
            lambda provider=provider, base=base, streamed=streamed: chat(
                f"{provider}/any", base, streamed
            ),
        )
        loop.case(
            f"{provider}/, full context",
            streamed,
            lambda provider=provider, base=base, streamed=streamed: full(
                f"{provider}/any", base, streamed
            ),
        )
