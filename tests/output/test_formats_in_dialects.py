"""What each family writes, through its template's detection and three dialects, streamed and whole:
text, a call, two calls, and reasoning before a call."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import attrs
import pytest

from tests.fakes import EOS, FakeEngine
from tests.output.published import FAMILIES, save_family
from tests.output.samples import ARGUMENTS, CALLS, TOOL, FormatTokenizer, pieces_of
from tests.web.serving import Served, exchange, post, serving
from tests.web.streams import joined_chat
from trouper.engine.loading.tokenizer import load
from trouper.protocol.output_formats import FUNCTIONARY_32

Json = dict[str, Any]
FUNCTION = TOOL["function"]
TURNS: list[Json] = [{"role": "user", "content": "x"}]
DIALECTS: dict[str, Json] = {
    "/v1/chat/completions": {"messages": TURNS, "tools": [TOOL]},
    "/v1/responses": {"input": "x", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {
        "messages": TURNS,
        "max_tokens": 2000,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": "edit", "input_schema": FUNCTION["parameters"]}],
    },
}
Answer = tuple[str, str, list[Json]]
"""Reasoning, content, and the arguments of calls of `edit`."""


@attrs.define
class Pieces(FormatTokenizer):
    """A token is a piece of the answer."""

    pieces: tuple[str, ...] = ()

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token].encode() if token < len(self.pieces) else b""


def answers(tokenizer: FormatTokenizer) -> dict[str, Answer]:
    """What the model writes, and what is meant."""
    name, thinking = str(tokenizer.tool_parser), tokenizer.thinking
    call, text = CALLS[name], "Hello!"
    written: dict[str, Answer] = {
        f"all\n{text}" if name == FUNCTIONARY_32 else text: ("", text, []),
        call.removeprefix(">>>"): ("", "", [ARGUMENTS]),
        f"{call}\n{call}": ("", "", [ARGUMENTS] * 2),
    }
    if thinking is not None:
        start, end = thinking
        written[f"{start}\nI look.\n{end}\n{call}"] = ("I look.", "", [ARGUMENTS])
    return written


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.long(
    but=(
        "DeepSeek V3.1",
        "Qwen3",
        "Hunyuan A13B",
        "MiniMax M2",
        "Mistral Small 3.2",
        "Kimi K2.5",
        "Command A",
        "Llama 4",
        "Functionary 3.2",
        "ERNIE 4.5",
        "Phi-4-mini",
        "LFM2",
    )
)
async def test_what_a_family_writes_arrives_in_three_dialects(family: str, tmp_path: Path) -> None:
    call, specials, *_ = FAMILIES[family]
    save_family(tmp_path, call, specials)
    detected = load(tmp_path).output_format
    tokenizer = Pieces(
        detected.tool_parser,
        detected.reasoning_parser,
        detected.thinking,
        detected.calling,
        detected.parse,
    )
    engine = FakeEngine(
        token_at=lambda _key, at: at if at < len(tokenizer.pieces) else EOS, tokenizer=tokenizer
    )
    drawn = Random(family)
    async with serving(engine) as served:
        for text, meant in answers(tokenizer).items():
            for path in DIALECTS:
                for stream in (False, True):
                    tokenizer.pieces = tuple(filter(None, pieces_of(text, drawn)))
                    assert await heard(served, path, stream=stream) == meant, (path, stream, text)


async def heard(served: Served, path: str, *, stream: bool) -> Answer:
    body = DIALECTS[path] | {"stream": stream}
    status, _, data = await exchange(served, post(path, body))
    assert status == 200, data
    if not stream:
        return READ[path](json.loads(data[data.index(b"{") : data.rindex(b"}") + 1]))
    events = [json.loads(event) for event in re.findall(rb"data: (\{.*\})", data)]
    return READ[path](JOINED[path](events))


def of_chat(answer: Json) -> Answer:
    message = answer["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return answer_of(message.get("reasoning_content"), message["content"], calls, "arguments")


def of_response(answer: Json) -> Answer:
    texts: dict[str, str] = {"reasoning": "", "message": ""}
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    for item in answer["output"]:
        if item["type"] in texts:
            texts[item["type"]] += "".join(part["text"] for part in item["content"])
    return answer_of(texts["reasoning"], texts["message"], calls, "arguments")


def of_message(answer: Json) -> Answer:
    texts: dict[str, str] = {"thinking": "", "text": ""}
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    for block in answer["content"]:
        if block["type"] in texts:
            texts[block["type"]] += block[block["type"]]
    return answer_of(texts["thinking"], texts["text"], calls, "input")


def answer_of(reasoning: str | None, content: str | None, calls: list[Json], key: str) -> Answer:
    assert {call["name"] for call in calls} <= {"edit"}
    values = [call[key] for call in calls]
    return (
        (reasoning or "").strip(),
        (content or "").strip(),
        [json.loads(one) if isinstance(one, str) else one for one in values],
    )


def joined_response(events: list[Json]) -> Json:
    items: list[Json] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            items.append(event["item"] | {"content": [{"text": ""}], "arguments": ""})
        elif kind == "response.function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            items[event["output_index"]]["content"][0]["text"] += event["delta"]
    return {"output": items}


def joined_message(events: list[Json]) -> Json:
    blocks: list[Json] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"input": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            for key, into in {
                "text": "text",
                "thinking": "thinking",
                "partial_json": "input",
            }.items():
                if key in delta:
                    block[into] += delta[key]
    return {"content": blocks}


READ = {
    "/v1/chat/completions": of_chat,
    "/v1/responses": of_response,
    "/v1/messages": of_message,
}
JOINED = {
    "/v1/chat/completions": lambda events: {"choices": joined_chat(events)},
    "/v1/responses": joined_response,
    "/v1/messages": joined_message,
}
