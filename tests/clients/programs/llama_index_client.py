"""llama-index: OpenAILike, which is what it has for such servers."""

import loop
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

model = OpenAILike(
    model="any",
    api_base=f"{loop.URL}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    max_retries=0,
    context_window=32000,
)


class Options(BaseModel):
    unit: str
    counts: list[int]


def run(streamed):
    tools, ids = loop.Tools(), []

    def weigh(place: str, options: Options) -> str:
        """Weigh what is there."""
        return tools.weigh(place, options)

    def note(text: str) -> str:
        """Note it."""
        return tools.note(text)

    made = {
        tool.metadata.name: tool
        for tool in (FunctionTool.from_defaults(weigh), FunctionTool.from_defaults(note))
    }
    history = [
        ChatMessage(role=MessageRole.SYSTEM, content=loop.SYSTEM),
        ChatMessage(role=MessageRole.USER, content=loop.QUESTION),
    ]
    for _ in range(loop.MAX_TURNS):
        asked = {
            "tools": list(made.values()),
            "chat_history": history,
            "allow_parallel_tool_calls": True,
        }
        if streamed:
            *_, answer = model.stream_chat_with_tools(**asked)
        else:
            answer = model.chat_with_tools(**asked)
            usage = answer.raw.usage
            loop.check_usage(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
        history.append(answer.message)
        calls = model.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
        if not calls:
            loop.check_ids(ids)
            tools.check(answer.message.content)
            return
        for call in calls:
            ids.append(call.tool_id)
            arguments = dict(call.tool_kwargs)
            result = str(getattr(tools, call.tool_name)(**arguments))
            history.append(
                ChatMessage(
                    role=MessageRole.TOOL,
                    content=result,
                    additional_kwargs={"tool_call_id": call.tool_id},
                )
            )
    raise AssertionError("it does not end")


loop.case("chat", False, lambda: run(False))
loop.case("chat", True, lambda: run(True))
