"""Conversations with images as requests of each API, and the answers' texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from tests.pictures import Picture, data_url, encoded
from tests.vision_model.questions import Message

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PATHS = (CHAT, MESSAGES, RESPONSES)
TOKENS = 16
"""More than any answer has."""
Json = dict[str, Any]


@attrs.frozen
class TextAnswer:
    text: str
    prompt_tokens: int
    """All of them, also those from the cache."""
    cached_tokens: int


def request(path: str, messages: Sequence[Message], pictures: Sequence[Picture]) -> Json:
    """A greedy request. The pictures are those of the image parts, in order."""
    shown = iter(pictures)
    if path == CHAT:
        turns = [_chat_message(message, shown) for message in messages]
        return {"messages": turns, "max_tokens": TOKENS, "temperature": 0}
    system = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    if path == MESSAGES:
        body: Json = {"messages": [_anthropic_message(message, shown) for message in others]}
        body |= {"max_tokens": TOKENS, "temperature": 0}
        return body | ({"system": system[0]} if system else {})
    items = [item for message in others for item in _items(message, shown)]
    body = {"input": items, "max_output_tokens": TOKENS, "temperature": 0, "store": False}
    return body | ({"instructions": system[0]} if system else {})


def content_of(message: Message) -> list[Message]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _chat_message(message: Message, shown: Iterator[Picture]) -> Json:
    if message.get("tool_calls"):
        [call] = message["tool_calls"]
        function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
        calls = [{"id": "call_1", "type": "function", "function": function}]
        return {"role": "assistant", "content": None, "tool_calls": calls}
    if isinstance(message["content"], str):
        return message
    content = [
        part
        if part["type"] == "text"
        else {"type": "image_url", "image_url": {"url": data_url(next(shown))}}
        for part in message["content"]
    ]
    result = {"tool_call_id": "call_1"} if message["role"] == "tool" else {}
    return {"role": message["role"], "content": content} | result


def _anthropic_message(message: Message, shown: Iterator[Picture]) -> Json:
    if message.get("tool_calls"):
        function = message["tool_calls"][0]["function"]
        use = {"type": "tool_use", "id": "toolu_1", "name": function["name"]}
        return {"role": "assistant", "content": [use | {"input": function["arguments"]}]}
    content = [
        part if part["type"] == "text" else _anthropic_image(next(shown))
        for part in content_of(message)
    ]
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
        return {"role": "user", "content": [result]}
    return {"role": message["role"], "content": content}


def _anthropic_image(picture: Picture) -> Json:
    source = {"type": "base64", "media_type": "image/png", "data": encoded(picture)}
    return {"type": "image", "source": source}


def _items(message: Message, shown: Iterator[Picture]) -> Iterator[Json]:
    if message.get("tool_calls"):
        function = message["tool_calls"][0]["function"]
        arguments = json.dumps(function["arguments"])
        call = {"type": "function_call", "call_id": "call_1", "name": function["name"]}
        yield call | {"arguments": arguments}
        return
    if message["role"] == "assistant":
        yield {"role": "assistant", "content": message["content"]}
        return
    content = [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": data_url(next(shown))}
        for part in content_of(message)
    ]
    if message["role"] == "tool":
        yield {"type": "function_call_output", "call_id": "call_1", "output": content}
    else:
        yield {"role": message["role"], "content": content}


def read_answer(path: str, body: Mapping[str, Any]) -> TextAnswer:
    """The text and the tokens of a whole answer."""
    usage = body["usage"]
    if path == CHAT:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        text = body["choices"][0]["message"]["content"]
        return TextAnswer(text, usage["prompt_tokens"], cached)
    if path == MESSAGES:
        cached = usage.get("cache_read_input_tokens") or 0
        text = "".join(part["text"] for part in body["content"] if part["type"] == "text")
        return TextAnswer(text, usage["input_tokens"] + cached, cached)
    cached = usage["input_tokens_details"]["cached_tokens"]
    texts = [item for item in body["output"] if item["type"] == "message"]
    text = "".join(part["text"] for item in texts for part in item["content"])
    return TextAnswer(text, usage["input_tokens"], cached)


def read_stream(path: str, data: bytes) -> str:
    """The text of a stream's deltas."""
    events = [json.loads(event) for event in re.findall(rb"data: (\{.*\})", data)]
    if path == CHAT:
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)
    if path == MESSAGES:
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        return "".join(delta.get("text", "") for delta in deltas)
    return "".join(
        event["delta"] for event in events if event["type"] == "response.output_text.delta"
    )
