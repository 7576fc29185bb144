"""The loop of both LangChain clients."""

import loop
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import StructuredTool


def bound(model, tools, **more):
    made = [
        StructuredTool(
            name=name,
            description=f"can {name}",
            args_schema=loop.SCHEMAS[name],
            func=getattr(tools, name),
        )
        for name in loop.SCHEMAS
    ]
    return {tool.name: tool for tool in made}, model.bind_tools(made, **more)


def run(model, streamed, **more):
    tools, ids = loop.Tools(), []
    made, asked = bound(model, tools, **more)
    messages = [SystemMessage(loop.SYSTEM), HumanMessage(loop.QUESTION)]
    for _ in range(loop.MAX_TURNS):
        if streamed:
            answer = None
            for chunk in asked.stream(messages):
                answer = chunk if answer is None else answer + chunk
        else:
            answer = asked.invoke(messages)
        assert not answer.invalid_tool_calls, answer.invalid_tool_calls
        usage = answer.usage_metadata
        loop.check_usage(usage["input_tokens"], usage["output_tokens"], usage["total_tokens"])
        messages.append(answer)
        if not answer.tool_calls:
            loop.check_ids(ids)
            text = answer.text if isinstance(answer.text, str) else answer.text()
            tools.check(text)
            return
        for call in answer.tool_calls:
            ids.append(call["id"])
            result = made[call["name"]].invoke(call)
            assert isinstance(result, ToolMessage)
            messages.append(result)
    raise AssertionError("it does not end")


def full(model, streamed):
    def ask(text):
        return list(model.stream(text)) if streamed else model.invoke(text)

    loop.overflows(ContextOverflowError, ask)
