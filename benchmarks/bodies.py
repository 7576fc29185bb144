"""`just bench-bodies`: what reading a request's body costs, from bytes to the typed request, in
three dialects.

Bodies of 15 MB (one text, and 10,000 messages) and 200 of an agent's: 30 tools with schemas, and 40
messages with calls and results. CPU time, which a busy machine changes little.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
from rich.console import Console

from trouper.web.anthropic.messages import MessagesRequest
from trouper.web.http.body_parsing import parse_json
from trouper.web.http.field_types import MAX_MESSAGES
from trouper.web.http.leniency import ReadPast
from trouper.web.openai.chat_completions import ChatRequest
from trouper.web.responses.response_request import parse_response

Json = dict[str, Any]
LARGE_BYTES = 15 * 2**20
AGENT_BODIES, AGENT_TOOLS, AGENT_ROUNDS = 200, 30, 20
SENTENCE = 'The "quick" brown fox\njumps over 3 < 4 lazy dogs, as in fox.py. '


@attrs.frozen
class Dialect:
    name: str
    conversation: str
    """Name of the parameter with the messages."""
    read: Callable[[Json, ReadPast], object]
    tool: Callable[[str, Json], Json]
    call: Callable[[str, str, Json], list[Json]]
    """A call and its result as messages: id, name of the tool, arguments."""


def _chat_tool(name: str, schema: Json) -> Json:
    function = {"name": name, "description": SENTENCE * 10, "parameters": schema}
    return {"type": "function", "function": function}


def _flat_tool(name: str, schema: Json) -> Json:
    return {"type": "function", "name": name, "description": SENTENCE * 10, "parameters": schema}


def _message_tool(name: str, schema: Json) -> Json:
    return {"name": name, "description": SENTENCE * 10, "input_schema": schema}


def _chat_call(call: str, name: str, arguments: Json) -> list[Json]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": call, "type": "function", "function": function}]
    answer = {"role": "assistant", "content": SENTENCE, "tool_calls": calls}
    return [answer, {"role": "tool", "tool_call_id": call, "content": SENTENCE * 20}]


def _flat_call(call: str, name: str, arguments: Json) -> list[Json]:
    made = {"type": "function_call", "call_id": call, "name": name}
    result = {"type": "function_call_output", "call_id": call, "output": SENTENCE * 20}
    return [made | {"arguments": json.dumps(arguments)}, result]


def _message_call(call: str, name: str, arguments: Json) -> list[Json]:
    answer = [
        {"type": "text", "text": SENTENCE},
        {"type": "tool_use", "id": call, "name": name, "input": arguments},
    ]
    result = {"type": "tool_result", "tool_use_id": call, "content": SENTENCE * 20}
    return [{"role": "assistant", "content": answer}, {"role": "user", "content": [result]}]


DIALECTS = (
    Dialect("chat/completions", "messages", ChatRequest.parse, _chat_tool, _chat_call),
    Dialect("responses", "input", parse_response, _flat_tool, _flat_call),
    Dialect("messages", "messages", MessagesRequest.parse, _message_tool, _message_call),
)


def _schema(number: int) -> Json:
    properties = {
        "file_path": {"type": "string", "description": SENTENCE},
        "limit": {"type": "integer", "minimum": 0, "maximum": 2000 + number},
        "mode": {"type": "string", "enum": ["read", "write", "append"], "description": SENTENCE},
        "edits": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"old": {"type": "string"}, "new": {"type": "string"}},
                "required": ["old", "new"],
                "additionalProperties": False,
            },
        },
    }
    return {"type": "object", "properties": properties, "required": ["file_path"]}


def _body(dialect: Dialect, messages: list[Json], **more: Any) -> bytes:
    length = "max_output_tokens" if dialect.conversation == "input" else "max_tokens"
    body = {"model": "model", length: 4096, "stream": True, dialect.conversation: messages}
    return json.dumps(body | more).encode()


def _one_text(dialect: Dialect) -> bytes:
    text = SENTENCE * (LARGE_BYTES // len(json.dumps(SENTENCE)[1:-1]))
    return _body(dialect, [{"role": "user", "content": text}])


def _many_messages(dialect: Dialect) -> bytes:
    """Write messages of `LARGE_BYTES` together."""
    text = SENTENCE * (LARGE_BYTES // MAX_MESSAGES // len(SENTENCE))
    roles = ("user", "assistant")
    return _body(
        dialect, [{"role": roles[index % 2], "content": text} for index in range(MAX_MESSAGES)]
    )


def _agent(dialect: Dialect) -> bytes:
    names = [f"tool_{number}" for number in range(AGENT_TOOLS)]
    messages: list[Json] = [{"role": "user", "content": SENTENCE * 5}]
    for turn in range(AGENT_ROUNDS):
        arguments = {"file_path": f"/src/{turn}.py", "edits": [{"old": "a", "new": SENTENCE}]}
        messages += dialect.call(f"call_{turn}", names[turn], arguments)
    tools = [dialect.tool(name, _schema(number)) for number, name in enumerate(names)]
    return _body(dialect, messages, tools=tools)


CASES = (
    ("one text", _one_text, 1),
    ("messages", _many_messages, 1),
    ("agent's", _agent, AGENT_BODIES),
)


def _read(dialect: Dialect, body: bytes, times: int) -> float:
    """Return the CPU seconds of reading the body so many times."""
    gc.collect()
    began = time.process_time()
    for _ in range(times):
        past = ReadPast()
        dialect.read(parse_json(body, past), past)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one line of JSON a figure")
    options = parser.parse_args()
    console = Console(width=100)
    for dialect in DIALECTS:
        for name, make, times in CASES:
            body = make(dialect)
            seconds = [_read(dialect, body, times) for _ in range(options.rounds)]
            ms = 1000 * statistics.median(seconds)
            row = {"dialect": dialect.name, "bodies": times, "kind": name, "bytes": len(body)}
            row |= {"ms": round(ms, 1), "least_ms": round(1000 * min(seconds), 1)}
            size = f"{times} of {len(body) / 2**20:.2f} MB"
            line = f"{dialect.name:17} {name:9} {size:15} {ms:8.1f} ms ({times / ms * 1000:.0f}/s)"
            console.print(json.dumps(row) if options.json else line, soft_wrap=True)


if __name__ == "__main__":
    main()
