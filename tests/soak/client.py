"""One request of the soak on a connection of its own: read at once, slowly, or not to its end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import Any, Literal

import attrs
import trio

from tests.abuse.asking import joined
from tests.web.serving import post

PATIENCE_S = 180.0
SLOW_BYTES = 256
Manner = Literal["reads", "slow", "leaves"]
"""How a client reads: what comes, a few bytes at a time with pauses, or not to the end."""
CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
Json = dict[str, Any]


KEY, LIMITED_KEY = "sk-soak", "sk-limited"
"""A key that may do everything, and one that may ask a few times a minute. A server without keys
takes any."""
FORM = "Content-Type: multipart/form-data; boundary=soak\r\n"


@attrs.frozen
class Ask:
    """`structured`: blanks of the answer do not count. `form`: a file to upload, instead of a
    body."""

    path: str
    body: Json | None = None
    method: str = "POST"
    structured: bool = False
    form: bytes | None = None
    key: str = KEY

    def data(self) -> bytes:
        headers = f"Connection: close\r\nAuthorization: Bearer {self.key}\r\n"
        if self.form is not None:
            return post(self.path, self.form, headers + FORM)
        if self.body is not None:
            return post(self.path, self.body, headers)
        return f"{self.method} {self.path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode()


@attrs.frozen
class Heard:
    """Status 0: the connection ended before there was one. `first_s`: to the first text; `gaps_s`:
    between texts. `short`: the connection ended before the body was as long as its head says."""

    status: int
    body: bytes = b""
    first_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    left: bool = False
    short: bool = False

    def json(self) -> Any:
        with suppress(ValueError):
            return json.loads(self.body)
        return None


async def ask(
    port: int, wish: Ask, manner: Manner = "reads", chance: Random | None = None
) -> Heard:
    """To the end of the answer, or to where the client leaves."""
    chance = chance or Random(0)
    stays_s = chance.uniform(0.02, 1.0) if manner == "leaves" else PATIENCE_S
    began, arrived, parts = trio.current_time(), list[float](), list[bytes]()
    with trio.move_on_after(stays_s) as limit, suppress(OSError, trio.BrokenResourceError):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            if manner == "slow":
                stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 4096)
            await stream.send_all(wish.data())
            while data := await stream.receive_some(SLOW_BYTES if manner == "slow" else 2**16):
                parts.append(bytes(data))
                if b"data: {" in data:
                    arrived.append(trio.current_time())
                if manner == "slow":
                    await trio.sleep(chance.uniform(0, 0.15))
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    status = int(head.split()[1]) if head.startswith(b"HTTP/1.1 ") else 0
    if limit.cancelled_caught:
        return Heard(status, left=manner == "leaves")
    gaps = [after - before for before, after in pairwise(arrived)]
    first_s = arrived[0] - began if arrived else None
    length = LENGTH.search(head)
    short = length is not None and len(body) < int(length[1])
    return Heard(
        status,
        joined(body) if b"chunked" in head.lower() else body,
        first_s,
        tuple(gaps),
        short=short,
    )


# -- what of an answer must be equal -------------------------------------------------------------

VOLATILE = {
    *(
        "id",
        "created",
        "created_at",
        "completed_at",
        "usage",
        "response_id",
        "previous_response_id",
        "metadata",
    ),
    *("cache_salt", "system_fingerprint", "store", "background", "loaded", "logprobs"),
}
TOLERANCE = 1e-3
"""Of numbers: rows are added up in another order in another batch."""


def answer_of(wish: Ask, heard: Heard) -> Any:
    """What of an answer must be equal however it was read: texts and how they ended, or an object
    without what names it."""
    if heard.status != 200:
        problem = (heard.json() or {}).get("error") or {}
        return [heard.status, problem.get("code")]
    streamed = bool(wish.body and wish.body.get("stream"))
    if wish.path in TEXTS:
        texts = (
            STREAMED[wish.path](list(events(heard.body)))
            if streamed
            else TEXTS[wish.path](heard.json())
        )
        return [["".join(text.split()) if wish.structured else text, end] for text, end in texts]
    return _stripped(heard.json())


def equal(one: Any, other: Any) -> bool:
    match one, other:
        case dict(), dict():
            return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
        case list(), list():
            return len(one) == len(other) and all(map(equal, one, other))
        case float(), float() | int():
            return bool(abs(one - other) <= TOLERANCE * max(1.0, abs(one)))
    return bool(one == other)


def events(body: bytes) -> Iterator[Json]:
    """Of a stream of server-sent events."""
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def _stripped(said: Any) -> Any:
    if isinstance(said, dict):
        return {key: _stripped(value) for key, value in said.items() if key not in VOLATILE}
    return [_stripped(one) for one in said] if isinstance(said, list) else said


Texts = list[tuple[str, Any]]
"""Of each choice: its text, and how it ended."""


def _responded(response: Json) -> Texts:
    texts = [
        part["text"]
        for item in response["output"]
        for part in item.get("content", ())
        if "text" in part
    ]
    return [("".join(texts), response["status"])]


def _chosen(said: list[Json]) -> Texts:
    texts, ends = dict[int, str](), dict[int, Any]()
    for event in said:
        if "error" in event:
            return [("", event["error"].get("code"))]
        for choice in event["choices"]:
            place, text = (
                choice["index"],
                choice.get("text") or choice.get("delta", {}).get("content") or "",
            )
            texts[place] = texts.get(place, "") + text
            ends[place] = choice.get("finish_reason") or ends.get(place)
    return [(texts[place], ends[place]) for place in sorted(texts)]


def _messaged(said: list[Json]) -> Texts:
    text, end = "", None
    for event in said:
        if event["type"] == "content_block_delta":
            text += event["delta"].get("text", "")
        elif event["type"] == "message_delta":
            end = event["delta"]["stop_reason"]
        elif event["type"] == "error":
            return [("", event["error"]["type"])]
    return [(text, end)]


TEXTS: dict[str, Callable[[Any], Texts]] = {
    CHAT: lambda said: [
        (one["message"]["content"], one["finish_reason"]) for one in said["choices"]
    ],
    COMPLETIONS: lambda said: [(one["text"], one["finish_reason"]) for one in said["choices"]],
    RESPONSES: _responded,
    MESSAGES: lambda said: [
        ("".join(part.get("text", "") for part in said["content"]), said["stop_reason"])
    ],
}
STREAMED: dict[str, Callable[[list[Json]], Texts]] = {
    CHAT: _chosen,
    COMPLETIONS: _chosen,
    RESPONSES: lambda said: (
        _responded(said[-1]["response"]) if "response" in said[-1] else [("", "error")]
    ),
    MESSAGES: _messaged,
}
