"""A fake engine that says what it is told to, and the official client to hear it with."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import openai
from openai.types.responses import Response, ResponseStreamEvent

from tests.fakes import EOS, ByteTokenizer, FakeEngine, TokenAt, ints
from tests.web.batching import strict
from tests.web.serving import Served
from tests.web.test_openai_client import in_thread

TOOL: Any = {
    "type": "function",
    "name": "f",
    "description": "does f",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}
CALL = '<call>{"name": "f", "arguments": {"a": 1}}</call>'
SAID = {
    "plain": "Hello there",
    "nothing": "",
    "thought": "<think>\nhm, so</think>Hello",
    "only thought": "<think>hm",
    "call": CALL,
    "everything": f"<think>let me see</think>\n\nI call it.\n{CALL}\n{CALL}",
    "call among text": f"a{CALL}b",
}
"""With what it must become below, in ITEMS."""
MESSAGE, REASONING, FUNCTION = "message", "reasoning", "function_call"
ITEMS = {
    "plain": [(MESSAGE, "Hello there")],
    "nothing": [(MESSAGE, "")],
    "thought": [(REASONING, "hm, so"), (MESSAGE, "Hello")],
    "only thought": [(REASONING, "hm")],
    "call": [(FUNCTION, '{"a": 1}')],
    "everything": [
        (REASONING, "let me see"),
        (MESSAGE, "I call it."),
        (FUNCTION, '{"a": 1}'),
        (FUNCTION, '{"a": 1}'),
    ],
    "call among text": [(MESSAGE, "a"), (FUNCTION, '{"a": 1}'), (MESSAGE, "b")],
}


async def by_client(served: Served, use: Callable[[openai.OpenAI], Any]) -> Any:
    """In a thread, with a client that is closed afterwards."""

    def run() -> Any:
        with strict(served.base_url) as client:
            return use(client)

    return await in_thread(run)


class Verbatim(ByteTokenizer):
    """Every part of every message, and every variable, is in the prompt."""

    def encode_chat(self, messages: Sequence[Any], **variables: Any) -> tuple[int, ...]:
        return self.encode(json.dumps([messages, variables], sort_keys=True))


def says(*texts: str) -> TokenAt:
    """One text for each prompt, in the order in which they come; the last one for all that
    follow."""
    keys: dict[int, bytes] = {}

    def token_at(key: int, position: int) -> int:
        if key not in keys:
            keys[key] = texts[min(len(keys), len(texts) - 1)].encode()
        data = keys[key]
        return data[position] if position < len(data) else EOS

    return token_at


def saying(*texts: str, **more: Any) -> FakeEngine:
    return FakeEngine(token_at=says(*texts), **more)


def prompts_of(engine: FakeEngine) -> list[str]:
    return [
        bytes(ints(admit.prompt)).decode() for plan in engine.plans_seen for admit in plan.admit
    ]


def told(response: Response) -> list[tuple[str, str]]:
    """Each item's type and text."""
    said = []
    for item in response.output:
        match item.type:
            case "message":
                said.append(
                    (
                        MESSAGE,
                        "".join(part.text for part in item.content if part.type == "output_text"),
                    )
                )
            case "reasoning":
                said.append((REASONING, "".join(part.text for part in item.content or ())))
            case "function_call":
                said.append((FUNCTION, item.arguments))
    return said


def without_names(value: Any) -> Any:
    """What two runs of one request have in common: everything but ids, times and what was
    cached."""
    if isinstance(value, dict):
        drawn = ("id", "item_id", "call_id", "created_at", "completed_at", "cached_tokens")
        return {key: without_names(one) for key, one in value.items() if key not in drawn}
    return [without_names(one) for one in value] if isinstance(value, list) else value


def assembled(events: Sequence[ResponseStreamEvent]) -> list[tuple[str, str]]:
    """Of nothing but additions and deltas."""
    items: dict[int, tuple[str, str]] = {}
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(items)
            items[event.output_index] = (event.item.type, "")
        elif event.type in (
            "response.output_text.delta",
            "response.reasoning_text.delta",
            "response.function_call_arguments.delta",
        ):
            kind, text = items[event.output_index]
            items[event.output_index] = (kind, text + event.delta)
    return list(items.values())
