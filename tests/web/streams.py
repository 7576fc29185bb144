"""Streams put together again, in the form of a whole answer."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tests.web.serving import Served, exchange, post

Json = dict[str, Any]


async def stream(served: Served, body: Json, path: str = "/v1/completions") -> list[Json]:
    """The chunks, with usage in the last."""
    options = {"include_usage": True} | body.get("stream_options", {})
    status, _, data = await exchange(
        served, post(path, body | {"stream": True, "stream_options": options})
    )
    assert status == 200, data
    assert data.count(b"data: [DONE]") == 1, data
    return [msgspec.json.decode(event) for event in re.findall(rb"data: (\{.*\})", data)]


def joined(chunks: list[Json]) -> list[Json]:
    """The choices of completions."""
    choices: dict[int, Json] = {}
    for said in _said(chunks, choices):
        choice = choices[said["index"]]
        choice["text"] = choice.get("text", "") + said["text"]
        _add_logprobs(choice, said["logprobs"])
    return [choices[index] for index in sorted(choices)]


def joined_chat(chunks: list[Json]) -> list[Json]:
    """The choices of a chat. Ids of calls are random, so they are only looked at: each comes
    once."""
    choices: dict[int, Json] = {}
    for said in _said(chunks, choices):
        choice, delta = choices[said["index"]], said["delta"]
        message = choice.setdefault(
            "message", {"role": delta.get("role"), "content": None, "refusal": None}
        )
        for key in ("content", "reasoning_content"):
            if key in delta:
                message[key] = (message.get(key) or "") + delta[key]
        for part in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                calls.append(
                    {
                        "id": part["id"],
                        "type": part["type"],
                        "function": {"name": "", "arguments": ""},
                    }
                )
            for key, text in part["function"].items():
                calls[part["index"]]["function"][key] += text
        _add_logprobs(choice, said["logprobs"])
    return [choices[index] for index in sorted(choices)]


def _said(chunks: list[Json], choices: dict[int, Json]) -> list[Json]:
    """What each chunk says of a choice; what both kinds share is put together here."""
    every = [said for chunk in chunks for said in chunk["choices"]]
    for said in every:
        choice = choices.setdefault(said["index"], {"index": said["index"], "logprobs": None})
        assert choice.get("finish_reason") is None, "something came after the end"
        if "token_ids" in said:
            choice["token_ids"] = choice.get("token_ids", []) + said["token_ids"]
        for key in ("finish_reason", "matched_stop", "prompt_token_ids"):
            if key in said:
                assert choice.get(key) is None, "said twice"
                choice[key] = said[key]
    return every


def _add_logprobs(choice: Json, more: Json | None) -> None:
    if more is not None:
        before = choice["logprobs"] or dict.fromkeys(more)
        choice["logprobs"] = {
            key: more[key] if old is None else old + more[key] for key, old in before.items()
        }
