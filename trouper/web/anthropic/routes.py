"""Anthropic's endpoints."""

from __future__ import annotations

from functools import partial

from quart import Response

from trouper.web.anthropic.errors import OVERLOADED
from trouper.web.anthropic.message_dialect import COUNTED, MessageDialect
from trouper.web.anthropic.messages import (
    CountRequest,
    MessagesRequest,
    messages_to_generate,
    prompt_of,
)
from trouper.web.http.endpoints import COUNTS, GENERATES, Endpoint
from trouper.web.http.json_response import as_json
from trouper.web.http.request_schema import ref
from trouper.web.output.call_or_answer import with_calls
from trouper.web.output.output_parser import OutputParser
from trouper.web.serving.service import Service
from trouper.web.serving.tool_support import without_tools

ENDPOINT = partial(Endpoint, method="POST", tag="Anthropic", error=ref("AnthropicError"))
QUESTION = {"messages": [{"role": "user", "content": "Who was Molière?"}]}
TOOL = {
    "name": "look_up",
    "input_schema": {"type": "object", "properties": {"name": {"type": "string"}}},
}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look_up"}}


class Anthropic:
    def __init__(self, service: Service) -> None:
        self._service = service

    @ENDPOINT(
        path="/v1/messages",
        operation="createMessage",
        summary="Answer a conversation",
        request=MessagesRequest,
        answer=ref("AnthropicMessage"),
        events=ref("AnthropicEvent"),
        also=(*GENERATES, OVERLOADED),
        examples={
            "A question": QUESTION | {"max_tokens": 9},
            "A tool": QUESTION | FORCED | {"max_tokens": 99},
            "With thinking": QUESTION | {"max_tokens": 2000, "thinking": {"type": "adaptive"}},
        },
    )
    async def messages(self) -> Response:
        parsed = await self._service.read(MessagesRequest.parse)
        served = await self._service.served(parsed.model)
        if self._service.omits_tools(parsed.parsed_tools, served):
            parsed = without_tools(parsed)
        request_id, tools = self._service.request_id, parsed.parsed_tools
        images = self._service.image_parts(served)
        generate = await self._service.run_off_loop(
            messages_to_generate, parsed, request_id, served.sampling_defaults, images
        )
        [generate] = await self._service.with_images([generate], images)
        [generate] = with_calls([generate], tools, served.runtime.tokenizer, self._service.report)
        [answer] = await self._service.submit(served, [generate], parsed.priority)
        parser: OutputParser | None = None
        if tools.offered or generate.grammar is None or generate.grammar.channels:
            parser = self._service.parsers(served, tools, answer)()
        self._service.note_response_id(f"msg_{request_id}")
        dialect = MessageDialect(
            request_id,
            served.name,
            parser,
            omitted=parsed.parsed_thinking.omitted,
            cut=answer.accepted.max_tokens < parsed.max_tokens,
            silent=parsed.max_tokens == 0,
        )
        return await self._service.respond(dialect, [answer], stream=parsed.stream)

    @ENDPOINT(
        path="/v1/messages/count_tokens",
        operation="countMessageTokens",
        summary="How many tokens a conversation has",
        request=CountRequest,
        answer=COUNTED,
        also=(*COUNTS, OVERLOADED),
        examples={"A question": QUESTION, "A tool": QUESTION | FORCED},
    )
    async def count_tokens(self) -> Response:
        parsed = await self._service.read(CountRequest.parse)
        served = await self._service.served(parsed.model)
        self._service.account(served.name)
        if self._service.omits_tools(parsed.parsed_tools, served):
            parsed = without_tools(parsed)
        images = self._service.image_parts(served)
        prompt = await self._service.prompt_with_images(
            await self._service.run_off_loop(prompt_of, parsed, images), images
        )
        return as_json({"input_tokens": len(await self._service.tokens(served, prompt))})
